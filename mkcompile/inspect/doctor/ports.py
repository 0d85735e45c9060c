"""Ports, speeds and firmware of the NICs by pyverbs, in whichever Python of this machine can import it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mkcompile.inspect.doctor.check import Check

_VIEW = Path(__file__).with_name("pyverbs_view.py")
#: Debian's package is for the system's Python. Always another process: what a provider breaks stays there.
PYTHONS = (sys.executable, "/usr/bin/python3")
_LIMIT_S = 20.0


def check(pythons: Sequence[str] = PYTHONS) -> Check:
    """What the first Python that has pyverbs says; `off` with the reason where none has it, or there is no device."""
    problems = []
    for python in dict.fromkeys(pythons):
        seen = _ask(python)
        if "devices" in seen:
            return _check(python, _listed(seen["devices"]))
        problems.append(f"{python}: {seen['problem']}")
    return _check("", "; ".join(problems))


def _ask(python: str) -> Mapping[str, Any]:
    """The view of one Python."""
    try:
        done = subprocess.run([python, "-I", str(_VIEW)], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        seen: Mapping[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"problem": str(error)}
    except ValueError:
        said = done.stderr.strip().splitlines()
        return {"problem": said[-1] if said else f"ended with {done.returncode} and said nothing"}
    return seen


def _listed(devices: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for one in devices:
        ports = "; ".join(
            f"port {port['number']} {port['state']}, {port['link']}, {port['speed_gbps']:g} Gb/s, MTU "
            f"{port['mtu_bytes']}, gids {', '.join(port['addresses']) or 'none'}"
            for port in one["ports"]
        )
        parts.append(f"{one['name']} (firmware {one['firmware'] or 'none'}, vendor {one['vendor']}): {ports}")
    return " | ".join(parts) or "no device"


def _check(python: str, found: str) -> Check:
    return Check(
        name="pyverbs",
        status="ok" if python and found != "no device" else "off",
        found=f"{found} (by {python})" if python else found,
        cost="nothing runs slower: only firmware and address tables of NICs are not shown",
        remedy="apt-get install python3-pyverbs (the doctor asks /usr/bin/python3, whatever runs mkcompile)",
    )
