"""What a node is: the processes that can share memory, by the kernel that they run on."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

from mkcompile.config import settings

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
EMULATED = "emulated"


@cache
def node_name() -> str:
    """The node of this process: `MKCOMPILE_NODE`, else the host's name and its kernel's boot id.

    Hosts can have equal names, and containers of one host different ones: set `MKCOMPILE_NODE` for the latter, and for
    a rack that is one NVLink domain. Over the emulated network each process is a node of its own.
    """
    if settings().node:
        return settings().node
    name = f"{socket.gethostname()}/{_BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else ''}"
    return f"{name}/{os.getpid()}" if settings().transport == EMULATED else name
