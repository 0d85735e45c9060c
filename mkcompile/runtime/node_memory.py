"""Memory of a group that spans nodes: a block on each rank, mapped by the ranks of its node.

Plain device memory, which a NIC can register, shared with the other processes of the node by CUDA's own handles. The
handles travel through the group's store. Over the emulated network every rank maps every other, wherever it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mkcompile.errors import UnsupportedDeviceError, WorkspaceError
from mkcompile.runtime import driver
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.symmetric import SymmetricBuffer


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class DeviceBlock:
    """Device memory that this process owns, and its handle for others, if there are any."""

    address: int
    size_bytes: int
    handle: bytes


class Mapping:
    """Another process's block, as it is mapped here until `end` is called or nobody holds this."""

    def __init__(self, handle: bytes, device_idx: int) -> None:
        """Raises: DriverError."""
        self.address = driver.import_memory(handle, device_idx)
        self.end = weakref.finalize(self, driver.forget_memory, self.address, device_idx)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBacking:
    """`reached`: the ranks of the group whose memory this rank maps, its own included."""

    device: torch.device
    exchange: Exchange
    reached: Sequence[int]

    @property
    def handshakes(self) -> None:
        """Each group's handles go through its own store."""
        return None

    def allocate(self, size_bytes: int, zeroed_bytes: int) -> DeviceBlock:
        """Raises: WorkspaceError."""
        device_idx, is_alone = self._device_idx(), all(rank == self.exchange.rank for rank in self.reached)
        address = 0
        try:
            address = driver.allocate(size_bytes, zeroed_bytes, device_idx)
            handle = b"" if is_alone else driver.export_memory(address, device_idx)
        except driver.DriverError as error:
            if address:
                driver.free(address, device_idx)
            raise WorkspaceError(f"no {size_bytes >> 20} MiB of memory that a node shares: {error}") from error
        block = DeviceBlock(address=address, size_bytes=size_bytes, handle=handle)
        weakref.finalize(block, driver.free, address, device_idx)
        return block

    def connect(self, memory: DeviceBlock) -> SymmetricBuffer:
        """Collective. Raises: UnsupportedDeviceError."""
        handles = self.exchange.gather("node memory", memory.handle.hex())
        addresses, mappings = [0] * len(handles), list[Mapping]()
        for rank in self.reached:
            if rank == self.exchange.rank:
                addresses[rank] = memory.address
                continue
            try:
                mappings.append(Mapping(bytes.fromhex(handles[rank]), self._device_idx()))
            except driver.DriverError as error:
                raise UnsupportedDeviceError(f"no mapping of the memory of rank {rank}: {error}") from error
            addresses[rank] = mappings[-1].address

        def unmap() -> None:
            for one in mappings:
                one.end()

        return SymmetricBuffer(
            addresses=tuple(addresses), size_bytes=memory.size_bytes, keep=(mappings, memory), unmap=unmap
        )

    def settle(self) -> None:
        """Wait for all that the device was given."""
        torch.cuda.synchronize(self.device)

    def _device_idx(self) -> int:
        assert self.device.index is not None
        return self.device.index
