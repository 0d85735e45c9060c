"""The host proxy's binding: kernels or the host publish commands in a ring, a thread in C++ gives them to a network."""

from __future__ import annotations

from mkcompile.runtime.proxy.abi import Command
from mkcompile.runtime.proxy.bootstrap import Local, choose_transport, configured, connect, with_nic
from mkcompile.runtime.proxy.nic_choice import NicChoice, choose_nic, pci_address
from mkcompile.runtime.proxy.session import Place, Proxy, ProxyEvent
from mkcompile.runtime.proxy.settings import Hooks, Link, ProxyConfig, Region, Ring

__all__ = [
    "Command",
    "Hooks",
    "Link",
    "Local",
    "NicChoice",
    "Place",
    "Proxy",
    "ProxyConfig",
    "ProxyEvent",
    "Region",
    "Ring",
    "choose_nic",
    "choose_transport",
    "configured",
    "connect",
    "pci_address",
    "with_nic",
]
