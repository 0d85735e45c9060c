"""What is not fused, over the emulated network of two nodes: cuBLAS, then the same bytes by the same proxy.

Product and what comes lie in the registered workspace, so nothing is copied for the network; messages are of 1 MB. One
thread hands them over and waits for those that come. Shapes: M rows of the product, N columns.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from mkcompile.runtime import abi, driver, network_abi
from mkcompile.runtime.kernel import OPTIONS
from mkcompile.runtime.kernel_cache import compiled
from tests.gpu.network_ranks import NodeGroup
from tests.gpu.ranks import RankInput

_CHUNK_BYTES = 1 << 20
_PARTIAL, _FINAL = 0, 2  # NetworkFlagKind
_ELEMENT_BYTES = 2
_SOURCE = r"""
namespace mk { inline constexpr bool kTrace = false; }
#include "device/network/ring.cuh"
extern "C" __global__ void exchange(const __grid_constant__ mk::NetworkLaunchArguments args, mk::u64 source,
                                    mk::u64 destination, mk::u64 bytes, mk::u64 chunk_bytes, mk::u32 kind,
                                    mk::u32 epoch) {
  using namespace mk;
  const u32 other = 1 - args.net.node, chunks = (u32)((bytes + chunk_bytes - 1) / chunk_bytes);
  const NetworkFlags flags{args, epoch};
  fence_acq_rel_sys();  // the stream's earlier kernels wrote what is sent
  for (u32 chunk = 0; chunk < chunks; ++chunk) {
    const u64 begin = chunk * chunk_bytes;
    Command command{};
    command.source_offset = source + begin, command.destination_offset = destination + begin;
    command.bytes = bytes - begin < chunk_bytes ? bytes - begin : chunk_bytes;
    command.peer = rail_peer(args, other), command.epoch = epoch;
    command.chunk = flags.chunk((NetworkFlagKind)kind, args.net.node, chunk);
    if (!push_command<kGemmReduceScatter>(args, command, WaitSite{kNetSendRole, other, chunk})) return;
  }
  for (u32 chunk = 0; chunk < chunks; ++chunk) {
    const u32* flag = flags.word(flags.chunk((NetworkFlagKind)kind, other, chunk));
    if (!wait_network<kGemmReduceScatter>(args, flag, epoch, WaitSite{kNetReceiveRole, other, chunk})) return;
  }
}
"""


@cache
def _function(device: int) -> ctypes.c_void_p:
    image = compiled("network_exchange", _SOURCE + network_abi.assertions(), OPTIONS).image
    return driver.load_function(image, "exchange", 0, device)


@dataclass(frozen=True, slots=True)
class Places:
    """A parity's buffers in the workspace: product and result of M x N, and the half that comes. Units: bytes."""

    start: int
    matrix_bytes: int

    @property
    def product(self) -> int:
        """This rank's partial sums."""
        return self.start

    @property
    def result(self) -> int:
        """An all-reduce's result."""
        return self.start + self.matrix_bytes

    @property
    def inbox(self) -> int:
        """The other's partial sums of the own rows."""
        return self.start + 2 * self.matrix_bytes


@dataclass(frozen=True, slots=True)
class Plain:
    """Two ranks, and how often each has exchanged: the workspaces' flags hold it, whatever is multiplied."""

    group: NodeGroup
    epochs: list[int] = field(default_factory=lambda: [0, 0])


def arena_bytes(m: int, n: int) -> int:
    """Of a workspace in which `Unfused` has room."""
    return 2 * (5 * m * n * _ELEMENT_BYTES // 2) + (16 << 20)


class Unfused:
    """GEMM and reduce-scatter, or all-reduce, of two ranks on two nodes; buffers alternate from call to call."""

    def __init__(self, plain: Plain, inputs: list[RankInput], all_reduce: bool) -> None:
        assert (plain.group.world, plain.group.nodes) == (2, 2)
        self.group, self.epochs, self.inputs, self.all_reduce = plain.group, plain.epochs, inputs, all_reduce
        self.m, self.n = inputs[0].x.shape[0], inputs[0].w.shape[0]
        self.results: list[Tensor] = [torch.empty(0)] * 2
        self._packed = [self._arguments(rank) for rank in range(2)]
        self._launch = driver.library().cuLaunchKernelEx
        self._load()

    def multiply(self, rank: int) -> None:
        """The product alone."""
        given = self.inputs[rank]
        torch.mm(given.x, given.w.t(), out=self._view(rank, self._places(rank).product, self.m))

    def run(self, rank: int) -> None:
        """On torch's current stream; the result is in `results`."""
        self.epochs[rank] += 1
        places, half = self._places(rank), self.m // 2
        half_bytes = half * self.n * _ELEMENT_BYTES
        self.multiply(rank)
        self._exchange(rank, places.product + (1 - rank) * half_bytes, places.inbox, half_bytes, _PARTIAL)
        own = self._view(rank, places.product, self.m)[rank * half : (rank + 1) * half]
        result = self._view(rank, places.result, self.m)
        mine = result[rank * half : (rank + 1) * half]
        torch.add(own, self._view(rank, places.inbox, half), out=mine)
        self.results[rank] = mine
        if self.all_reduce:
            at = places.result + rank * half_bytes
            self._exchange(rank, at, at, half_bytes, _FINAL)
            self.results[rank] = result

    def _load(self) -> None:
        """All that will run. Code that is loaded beside a kernel that waits for a proxy holds the proxy up."""
        for rank, device in enumerate(self.group.devices):
            with torch.cuda.device(device):
                _function(device)
                self.multiply(rank)
                rows = self._view(rank, self._places(rank).product, self.m // 2)
                torch.add(rows, rows, out=rows)
            torch.cuda.synchronize(device)

    def _places(self, rank: int) -> Places:
        layout, matrix_bytes = self.group.layout, self.m * self.n * _ELEMENT_BYTES
        parity_bytes = 5 * matrix_bytes // 2
        assert 2 * parity_bytes <= layout.total_bytes - layout.region_offset, "use arena_bytes()"
        return Places(layout.region_offset + self.epochs[rank] % 2 * parity_bytes, matrix_bytes)

    def _view(self, rank: int, offset: int, rows: int) -> Tensor:
        flat = self.group.workspaces[rank][offset : offset + rows * self.n * _ELEMENT_BYTES]
        return flat.view(torch.bfloat16).view(rows, self.n)

    def _arguments(self, rank: int) -> network_abi.NetworkLaunchArguments:
        packed = abi.aligned_block(network_abi.NetworkLaunchArguments)
        peers, layout = self.group.peers(rank), self.group.layout
        table, net = peers.network, packed.net
        assert table is not None
        packed.rank, packed.world, packed.workspace[0] = 0, 1, peers.workspaces[0]
        packed.fault, packed.deadline_ns = peers.fault_address, int(peers.timeout_s * 1e9)
        net.ring_control, net.ring_slots, net.ring_capacity = table.ring_control, table.ring_slots, table.capacity
        net.node, net.nodes, net.max_chunks = rank, 2, layout.max_chunks
        net.header_offset, net.flags_offset = layout.network_offset, layout.network_flags_offset
        return packed

    def _exchange(self, rank: int, source: int, destination: int, num_bytes: int, kind: int) -> None:
        assert num_bytes <= self.group.layout.max_chunks * _CHUNK_BYTES
        u64, u32 = ctypes.c_uint64, ctypes.c_uint32
        numbers = (u64(source), u64(destination), u64(num_bytes), u64(_CHUNK_BYTES), u32(kind), u32(self.epochs[rank]))
        addresses = [ctypes.addressof(one) for one in (self._packed[rank], *numbers)]
        launch = driver.LaunchConfig(grid=(1, 1, 1), block=(1, 1, 1), shared_bytes=0, num_attributes=0)
        launch.stream = torch.cuda.current_stream().cuda_stream
        parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        code = self._launch(ctypes.byref(launch), _function(self.group.devices[rank]), parameters, None)
        driver.check("cuLaunchKernelEx(exchange)", code)
