"""How the ranks of a group make their proxies know each other: through the group's store alone.

Each step is told to all. Where one rank fails, all raise, at the same step, and nobody waits for one that gave up.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, replace

import torch
from torch.distributed import ProcessGroup

from mkcompile.errors import MkcompileError, NoDeviceError, ProxyUnavailableError, TransportError
from mkcompile.runtime.exchange import Exchange
from mkcompile.runtime.proxy.nic_choice import choose_nic, is_name, pci_address
from mkcompile.runtime.proxy.session import Place, Proxy
from mkcompile.runtime.proxy.settings import Hooks, ProxyConfig, Region, Ring, Transport
from mkcompile.runtime.proxy.trial import try_transport

_TOPIC = "proxy"
#: Best first, for `choose_transport`. `emulated` and `unordered` are for tests and never chosen.
PREFERENCE: tuple[Transport, ...] = ("srd", "rc", "tcp")
#: Those whose device is a NIC that speaks verbs.
NIC_TRANSPORTS: tuple[Transport, ...] = ("srd", "rc", "unordered")


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What this rank brings: its memory, and how the proxy gets at it."""

    region: Region
    hooks: Hooks = field(default_factory=Hooks)
    ring: Ring = field(default_factory=Ring)


def connect(group: ProcessGroup, local: Local, config: ProxyConfig, timeout_s: float = 0.0) -> Proxy:
    """A running proxy on every rank of the group; collective.

    Units: `timeout_s` seconds for each step and for each later wait; 0: the group's own timeout.
    Raises: PeerTimeoutError for ranks that do not come; the rank's own TransportError or ProxyUnavailableError where it
    failed itself; ProxyUnavailableError, naming the ranks, where others did.
    """
    exchange = Exchange(group, _TOPIC, timeout_s)
    place = Place(rank=exchange.rank, ranks=exchange.ranks, timeout_s=exchange.timeout_s)
    proxy: Proxy | None = None
    failure: MkcompileError | None = None
    told = ""
    try:
        proxy = Proxy(place, local.region, config, local.hooks, local.ring)
        told = _pack(proxy)
    except (TransportError, ProxyUnavailableError) as error:
        failure = error
    try:
        endpoints = _share(exchange, "proxy: open", failure, told)
        assert proxy is not None
        _share(exchange, "proxy: started", _join(proxy, endpoints), "")
    except MkcompileError:
        if proxy is not None:
            proxy.close(0)
        raise
    return proxy


def choose_transport(group: ProcessGroup, timeout_s: float = 0.0) -> tuple[Transport, str]:
    """The best transport that every rank has, and why no better one; collective, the same on all ranks.

    Raises: ProxyUnavailableError where a rank has none.
    """
    exchange = Exchange(group, f"{_TOPIC}/transport", timeout_s)
    try:
        lacks = {name: try_transport(name).problem for name in PREFERENCE}
    except ProxyUnavailableError as error:
        lacks = dict.fromkeys(PREFERENCE, str(error))
    everyone = [json.loads(text) for text in exchange.gather("transports", json.dumps(lacks))]
    reasons: list[str] = []
    for name in PREFERENCE:
        without = [(exchange.ranks[rank], one[name]) for rank, one in enumerate(everyone) if one[name]]
        if not without:
            return name, "; ".join(reasons)
        reasons.append(f"no {name}: rank {without[0][0]}: {without[0][1]}")
    raise ProxyUnavailableError("; ".join(reasons))


def configured(
    group: ProcessGroup, network: str, config: ProxyConfig, timeout_s: float = 0.0, device: torch.device | None = None
) -> ProxyConfig:
    """`config` with the transport and NIC of `MKCOMPILE_NETWORK`; collective where that is `auto`.

    `device`: the GPU whose memory is sent, to which the NIC should be near; None: a rank on the CPU.
    Raises: OptionError for a transport that does not exist; ProxyUnavailableError as `choose_transport`.
    """
    asked, _, names = network.partition(":")
    transport = choose_transport(group, timeout_s)[0] if asked == "auto" else asked
    return with_nic(replace(config, transport=transport, device=names), device)  # type: ignore[arg-type]


def with_nic(config: ProxyConfig, device: torch.device | None) -> ProxyConfig:
    """The NIC that a proxy should use for memory of `device` (None: the host's), where its transport has NICs.

    `config.device` may name one, which is then taken as it is, or several with commas between them, to choose among.
    What this rank lacks is found again when the proxy is opened, where all ranks hear of it: it is not raised here.
    """
    if config.transport not in NIC_TRANSPORTS:
        return config
    among = tuple(name for name in config.device.split(",") if name)
    if len(among) == 1:
        return config
    for name in among:
        if not is_name(name):
            return replace(config, device=name)
    try:
        address = pci_address(device) if device is not None else ""
        return replace(config, device=choose_nic(address, config.transport, among).name)
    except NoDeviceError:
        return replace(config, device=among[0] if among else "")


def _pack(proxy: Proxy) -> str:
    """An endpoint for each peer, as the store takes it."""
    own = proxy.place.rank
    peers = [peer for peer in range(proxy.place.world_size) if peer != own]
    return json.dumps({str(peer): base64.b64encode(proxy.endpoint(peer)).decode() for peer in peers})


def _share(exchange: Exchange, step: str, failure: MkcompileError | None, value: str) -> list[str]:
    """Every rank's value; where any rank failed, its own error here and their names elsewhere."""
    said = exchange.gather(step, json.dumps({"failure": str(failure) if failure else "", "value": value}))
    if failure is not None:
        raise failure
    everyone = [json.loads(text) for text in said]
    exchange.raise_failures([one["failure"] for one in everyone], ProxyUnavailableError, "host proxy")
    return [one["value"] for one in everyone]


def _join(proxy: Proxy, endpoints: list[str]) -> TransportError | None:
    """Connect to all and start, what fails given back: a rank whose thread does not start must be heard of, too."""
    try:
        for peer, text in enumerate(endpoints):
            if peer != proxy.place.rank:
                proxy.connect(peer, base64.b64decode(json.loads(text)[str(proxy.place.rank)]))
        proxy.finish()
        proxy.start()
    except TransportError as error:
        return error
    return None
