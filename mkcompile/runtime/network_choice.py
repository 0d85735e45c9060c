"""Which network carries the data of fused kernels between nodes, as this rank sees it."""

from __future__ import annotations

from mkcompile.config import settings
from mkcompile.errors import OptionError
from mkcompile.runtime.proxy.nic_choice import gbps_of_a_gpu
from mkcompile.runtime.proxy.settings import Link, ProxyConfig

#: What a single thread moves through sockets and pinned memory; an assumption, nothing was measured between machines.
TCP_GBPS = 3.0
_EMULATED_LATENCY_US = 5.0
#: Queues of a GPU with which a proxy's few streams had one of their own; CUDA's most. Source:
#: docs/decisions/404-queues-of-the-device.md.
QUEUES_FOR_PROXIES = 32


def transport_of_kernels() -> str:
    """The transport of `MKCOMPILE_NETWORK`; nothing under `auto`, since kernels have not run over a NIC yet."""
    return "" if settings().transport == "auto" else settings().transport


def has_queues(transport: str, queues: int) -> bool:
    """Can a proxy of this transport work beside kernels that wait for it? `queues`: of the GPU, for all streams.

    Those of `rc` need them where the NIC can't reach the GPU's memory or does not keep the order of writes, which shows
    only once it is open.
    """
    return bool(transport) and queues >= QUEUES_FOR_PROXIES


def network_gbps(transport: str) -> float:
    """What the planner takes the network of a GPU for: the rate of its NIC, or of the emulated link. 0: nothing is
    known. Units: GB/s. Raises: OptionError.
    """
    if transport in ("", "tcp"):
        return TCP_GBPS if transport else 0.0
    config = proxy_config(transport)
    if transport == "emulated":
        return config.link.bandwidth_gbps
    return gbps_of_a_gpu(transport, [name for name in config.device.split(",") if name])


def _link(gbps: str) -> Link:
    try:
        return Link(bandwidth_gbps=float(gbps), latency_us=_EMULATED_LATENCY_US)
    except ValueError as error:
        raise OptionError(f"MKCOMPILE_NETWORK=emulated:{gbps}: not a number of GB/s") from error


def proxy_config(transport: str) -> ProxyConfig:
    """For the proxies of a group. What follows the colon in `MKCOMPILE_NETWORK` is a NIC or interface; of `emulated`
    the link's GB/s, which then has a latency, too.

    Raises: OptionError.
    """
    asked, _, device = settings().network.partition(":")
    if transport == "emulated":
        return ProxyConfig(transport="emulated", link=_link(device) if device else Link())
    return ProxyConfig(transport=transport, device=device if asked == transport else "")  # type: ignore[arg-type]
