"""What pyverbs says of this machine's NICs: ports, speeds, firmware. Standard library and pyverbs only.

Debian's pyverbs belongs to the system's Python, which is seldom the one that runs torch. So this file is a program:
`python3 pyverbs_view.py` prints one line of JSON, whichever Python that is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

# ibv_port_attr.active_speed and active_width: gigabits a second of a lane (FDR10 is 8), and lanes
_LANE_GBPS = {1: 2.5, 2: 5, 4: 10, 8: 10, 16: 14, 32: 25, 64: 50, 128: 100, 256: 200}
_LANES = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
_LINKS = {0: "unspecified", 1: "InfiniBand", 2: "Ethernet"}
_STATES = ("no change", "down", "init", "armed", "active", "active deferred")
_GID_KINDS = ("InfiniBand", "RoCE v1", "RoCE v2")


def view() -> dict[str, Any]:
    """`devices`, each with its ports, or `problem`: why there is no view."""
    try:
        device = import_module("pyverbs.device")
        failure = import_module("pyverbs.pyverbs_error").PyverbsError
    except ImportError as error:
        return {"problem": f"pyverbs can't be imported: {error}"}
    try:
        names = [one.name.decode() for one in device.get_device_list()]
        return {"devices": [_device(device.Context(name=name), name) for name in names]}
    except failure as error:
        return {"problem": f"pyverbs: {' '.join(str(error).split())}"}


def _device(context: Any, name: str) -> dict[str, Any]:
    attributes = context.query_device()
    ports = range(1, attributes.phys_port_cnt + 1)
    rows = context.query_gid_table(sum(context.query_port(number).gid_tbl_len for number in ports))
    return {
        "name": name,
        "firmware": str(attributes.fw_version).strip("\x00"),
        "vendor": f"{attributes.vendor_id:#x}",
        "ports": [_port(context, number, rows) for number in ports],
    }


def _port(context: Any, number: int, rows: Sequence[Any]) -> dict[str, Any]:
    port = context.query_port(number)
    own = [row for row in rows if row.port_num == number]
    return {
        "number": number,
        "state": _name(_STATES, port.state),
        "link": _LINKS.get(port.link_layer, str(port.link_layer)),
        "speed_gbps": _LANE_GBPS.get(port.active_speed, 0) * _LANES.get(port.active_width, 0),
        "mtu_bytes": 128 << port.active_mtu,
        "addresses": [f"{row.gid_index}: {row.gid_str()} ({_name(_GID_KINDS, row.gid_type)})" for row in own],
    }


def _name(names: Sequence[str], value: int) -> str:
    return names[value] if 0 <= value < len(names) else str(value)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(view()) + "\n")
