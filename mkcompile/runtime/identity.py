"""What a launch is, in a word that all ranks must agree on and in a text for people."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from mkcompile.runtime.abi import KernelArguments
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.network_abi import NetworkLaunchArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchIdentity:
    """`text` holds all that the ranks of one launch share, `number` is its hash: the kernels compare it."""

    number: int
    text: str

    @staticmethod
    def of(text: str) -> LaunchIdentity:
        """The identity of a launch that `text` describes; no addresses, no rank."""
        return LaunchIdentity(number=zlib.crc32(text.encode()), text=text)


def with_result(identity: LaunchIdentity, offset: int) -> LaunchIdentity:
    """The identity of a launch into whose result peers store. Units: `offset` bytes, where it lies on every rank."""
    return LaunchIdentity.of(f"{identity.text}, result at {offset:#x}")


def of_launch(config: KernelConfig, packed: KernelArguments) -> LaunchIdentity:
    """Operator, sizes, kernel and order; not the grid, which may differ by rank, nor whether a rank is traced."""
    k = "+".join(str(k) for k in packed.k[: packed.terms])
    kernel = config.name.removesuffix("_trace").removeprefix(f"{config.operator}_")
    net = packed.net if isinstance(packed, NetworkLaunchArguments) else None
    nodes = ""
    if net is not None:
        nodes = f" on each of {net.nodes} nodes (lag {net.lag}, {net.slots} slots, {net.chunk_tiles} a message)"
    segments = f", {packed.segments} segments" if packed.segments > 1 else ""
    return LaunchIdentity.of(
        f"{config.operator} {packed.m}x{packed.n}x{k}{segments} on {packed.world} ranks{nodes}, {kernel}, "
        f"raster {packed.raster_group}, lag {packed.lag}, {packed.slots} slots, scale {packed.scale:g}"
    )
