"""Runs every case of two processes on two GPUs; families of one environment share a pair of processes.

    python tests/gpu/run_processes.py [--only operators,graphs] [--out results.jsonl] [--device cpu|shared]

Prints one JSON line a case and a last one with the counts. A family whose processes hang or die costs only itself: its
cases that had finished are reported, the stack of the others is kept, and the families after it get processes of their
own. `--device cpu` tries the script itself over gloo; with `shared` both processes have the first GPU, which lets them
run by turns: the same kernels through the same handles, at no speed to speak of, and without NCCL.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORLD_SIZE = 2
START = time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Cases that share a pair of processes. `module` has `CASES`; `only` takes some of them.

    Units: seconds; `timeout_s` is the process group's. `may_die`: ranks that a case ends on purpose. `alone`: shares
    its processes with no other. `on_cpu`: cases that also run without GPUs, unfused. `needs_nccl`: which has one rank a
    GPU. `not_by_turns`: cases that judge times. In `environment` "{rank}" stands for the rank.
    """

    module: str
    limit_s: float
    timeout_s: float = 60.0
    environment: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    may_die: tuple[int, ...] = ()
    alone: bool = False
    on_cpu: tuple[str, ...] = ()
    needs_nccl: bool = False
    not_by_turns: tuple[str, ...] = ()

    def runs_on(self, device: str) -> bool:
        """Is there a case for "cuda", "shared" or "cpu"?"""
        return bool(self.on_cpu) if device == "cpu" else device == "cuda" or not self.needs_nccl


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
SHORT = {"MKCOMPILE_TIMEOUT_S": "5"}
RESERVE_16 = {"MKCOMPILE_TIMEOUT_S": "8", "MKCOMPILE_SM_RESERVE": "16"}
RESERVE_32 = {"MKCOMPILE_TIMEOUT_S": "8", "MKCOMPILE_SM_RESERVE": "32"}
NODES = {"MKCOMPILE_NODE": "node{rank}", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
NCCL = "tests.gpu.nccl_cases"
LARGE = ("large_first_on_rank_0", "large_first_on_rank_1", "gathers_first_on_rank_0", "gathers_first_on_rank_1")
#: Captures without warm-up come first, before other families have loaded kernels.
FAMILIES: dict[str, Family] = {
    "graphs": Family(
        module="tests.gpu.graph_cases",
        limit_s=150,
    ),
    "gather": Family(
        module="tests.gpu.gather_cases",
        limit_s=150,
        on_cpu=("rows",),
    ),
    "operators": Family(
        module="tests.gpu.operator_cases",
        limit_s=150,
        on_cpu=("rows", "sums", "misaligned"),
        not_by_turns=("overhead",),
    ),
    "adding": Family(module="tests.gpu.adding_cases", limit_s=150, on_cpu=("added", "compiled", "compiled_sequence")),
    "compiled": Family(module="tests.gpu.compiled_cases", limit_s=150, on_cpu=("tensor_parallel", "sequence_parallel")),
    "planned": Family(module="tests.gpu.planned_cases", limit_s=120, on_cpu=("planned_results",)),
    "streams": Family(module="tests.gpu.stream_cases", limit_s=90),
    "network_tcp": Family(
        module="tests.gpu.network_cases",
        limit_s=100,
        environment={**NODES, "MKCOMPILE_NETWORK": "tcp"},
        only=("products", "replays", "tensor_parallel", "sequence_parallel"),
    ),
    "network_emulated": Family(
        module="tests.gpu.network_cases",
        limit_s=90,
        environment={**NODES, "MKCOMPILE_NETWORK": "emulated:50"},
        only=("products", "tensor_parallel", "sequence_parallel"),
    ),
    "network_killed": Family(
        module="tests.gpu.network_cases",
        limit_s=60,
        environment={**NODES, **SHORT, "MKCOMPILE_NETWORK": "tcp"},
        only=("killed_peer",),
        may_die=(1,),
    ),
    "nccl": Family(module=NCCL, limit_s=60, environment={"MKCOMPILE_TIMEOUT_S": "8"}, needs_nccl=True),
    "nccl_reserve_16": Family(module=NCCL, limit_s=60, environment=RESERVE_16, only=LARGE, needs_nccl=True),
    "nccl_reserve_32": Family(module=NCCL, limit_s=60, environment=RESERVE_32, only=LARGE, needs_nccl=True),
    "stress": Family(module="tests.gpu.stress_cases", limit_s=90),
    "in_use": Family(module="tests.gpu.fault_cases", limit_s=60, environment=SHORT, only=("in_use", "in_use_gather")),
    "skipped": Family(
        module="tests.gpu.fault_cases",
        limit_s=60,
        environment=SHORT,
        only=("skipped", "skipped_gather", "replayed"),
    ),
    "groups": Family(
        module="tests.gpu.group_cases",
        limit_s=120,
        environment=SHORT,
        only=("give_back", "graphs", "threads", "reported"),
        on_cpu=("give_back",),
    ),
    "network_groups": Family(
        module="tests.gpu.group_cases",
        limit_s=60,
        environment={**NODES, "MKCOMPILE_NETWORK": "emulated:50"},
        only=("nodes",),
    ),
    "trace": Family(module="tests.gpu.trace_cases", limit_s=90, alone=True, not_by_turns=("overhead",)),
    "late": Family(module="tests.gpu.fault_cases", limit_s=90, environment=SHORT, only=("late", "late_gather")),
    "dead": Family(module="tests.gpu.fault_cases", limit_s=100, environment=SHORT, only=("dead",), may_die=(1,)),
    "killed": Family(module="tests.gpu.fault_cases", limit_s=100, environment=SHORT, only=("killed",), may_die=(1,)),
    "expandable": Family(
        module="tests.gpu.operator_cases", limit_s=90, environment=EXPANDABLE, only=("layouts", "growth")
    ),
}


def run_families(names: list[str], device: str, patience: float, until: float) -> list[dict[str, Any]]:
    """One result a case: family, name, ok, and each rank's value or error; up to the first family that was not ended.

    `names` agree in environment and deadlines: see `batches`. `until`: by the monotonic clock; who runs then is ended.
    """
    started = time.monotonic()
    limit_s = patience * sum(FAMILIES[name].limit_s for name in names)
    with tempfile.TemporaryDirectory(prefix="mkcompile-pair-") as folder:
        ranks = [_start_rank(names, rank, device, Path(folder)) for rank in range(WORLD_SIZE)]
        try:
            # imports torch: now, and not when the time is up
            cases = {name: _case_names(FAMILIES[name], device) for name in names}
            timed_out = _wait(ranks, min(started + limit_s, until))
        finally:
            _kill(ranks)
        codes = [rank.returncode for rank in ranks]
        logs = [(Path(folder) / f"log.{rank}").read_text(errors="replace")[-3000:] for rank in range(WORLD_SIZE)]
        said = [_read_lines(Path(folder) / f"result.{rank}") for rank in range(WORLD_SIZE)]
    results = []
    for name in names:
        alive = [rank for rank in range(WORLD_SIZE) if rank not in FAMILIES[name].may_die]
        for case in cases[name]:
            values = [said[rank].get((name, case)) for rank in range(WORLD_SIZE)]
            ok = all((values[rank] or {"ok": False})["ok"] for rank in alive)
            results.append({"family": name, "case": case, "ok": ok, "ranks": values})
        if any(said[rank].get((name, case)) is None for rank in alive):
            results[-1] |= {"timed_out": timed_out, "exit_codes": codes}
            break
    if any(not result["ok"] for result in results):
        results[-1]["logs"] = logs
    results[-1]["processes_s"] = round(time.monotonic() - started, 1)
    return results


def run_batch(names: list[str], device: str, patience: float, until: float) -> Iterator[dict[str, Any]]:
    """All results of families that share processes; after one that was not ended the others start in new ones.

    `until`: by the monotonic clock; nothing starts after it, and who runs then is ended.
    """
    while names:
        if time.monotonic() > until:
            yield from ({"family": name, "case": "", "ok": False, "error": "not run: out of time"} for name in names)
            return
        results = run_families(names, device, patience, until)
        yield from results
        names = names[names.index(results[-1]["family"]) + 1 :]


def batches(names: list[str]) -> list[list[str]]:
    """Families that share a pair of processes, in order of the first; those in which a rank ends go alone."""
    shared: dict[Any, list[str]] = {}
    for name in names:
        family = FAMILIES[name]
        key = name if family.may_die or family.alone else (family.timeout_s, *sorted(family.environment.items()))
        shared.setdefault(key, []).append(name)
    return list(shared.values())


def _case_names(family: Family, device: str) -> list[str]:
    wanted = family.on_cpu if device == "cpu" else family.only
    unwanted = family.not_by_turns if device == "shared" else ()
    return [name for name in _cases(family) if (not wanted or name in wanted) and name not in unwanted]


def _cases(family: Family) -> dict[str, Callable[[Any], dict[str, Any]]]:
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    cases: dict[str, Callable[[Any], dict[str, Any]]] = importlib.import_module(family.module).CASES
    return cases


def _start_rank(names: list[str], rank: int, device: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(Path(__file__)), "--rank", str(rank), "--folder", str(folder)]
    command += ["--only", ",".join(names), "--device", device]
    settings = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "4", "CUDA_MODULE_LOADING": "EAGER"}
    if device == "shared":
        settings["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    own = {name: text.replace("{rank}", str(rank)) for name, text in FAMILIES[names[0]].environment.items()}
    environment = {**os.environ, **settings, **own}
    with (folder / f"log.{rank}").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True)


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """True where one had to be ended. A hanging rank first writes its stack."""
    timed_out = False
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
    for how, patience_s in ((signal.SIGUSR1, 3.0), (signal.SIGKILL, 30.0)):
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(how)
        for rank in ranks:
            try:
                rank.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue
    return timed_out


def _kill(ranks: list[subprocess.Popen[bytes]]) -> None:
    """None may stay behind on the GPUs, not even where this script itself is ended."""
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()


def _read_lines(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["family"], line["case"]): line for line in lines}


def _end_with(parent: int) -> None:
    """Who starts the ranks may be killed, and can't end them then."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(3)


def run_rank(names: list[str], rank: int, device: str, folder: Path) -> None:
    """One of the two processes: all cases of the families, each result written as soon as it is there."""
    faulthandler.enable()  # a crash is to say where
    faulthandler.register(signal.SIGUSR1, chain=True)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    timeout_s = FAMILIES[names[0]].timeout_s
    pair_module = importlib.import_module("tests.gpu.pair")
    pair = pair_module.start(rank, WORLD_SIZE, folder / "rendezvous", device, timeout_s)
    with (folder / f"result.{rank}").open("w") as results:
        for family, case in [(name, case) for name in names for case in _case_names(FAMILIES[name], device)]:
            line = {"family": family, **_run_case(pair, case, _cases(FAMILIES[family])[case])}
            results.write(json.dumps(line, default=str) + "\n")
            results.flush()
            # where one may have ended, nobody is waited for: such a family is alone and has one case
            if FAMILIES[family].may_die or not pair_module.both_are_done(pair):
                break
    os._exit(0)  # neither NCCL nor a dead peer may hold up the end


def _run_case(pair: Any, case: str, function: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Its value or its error, and how long it took; counts of launches start anew."""
    started = time.monotonic()
    line: dict[str, Any] = {"case": case, "ok": True, "at": round(time.monotonic() - START, 1)}
    pair.forget_counts()
    try:
        line["value"] = function(pair)
        pair.synchronize()
    except Exception as error:  # a harness reports everything
        line |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:1500]}
        line["traceback"] = traceback.format_exc()[-2500:]
    return line | {"seconds": round(time.monotonic() - started, 2)}


def main() -> int:
    """0 where every case passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="families, separated by commas")
    parser.add_argument("--device", default="cuda", choices=("cuda", "shared", "cpu"))
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    parser.add_argument("--limit-s", type=float, default=560.0, help="end after this many seconds; say what had ended")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies the families' time limits")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if arguments.rank >= 0:
        run_rank(arguments.only.split(","), arguments.rank, arguments.device, arguments.folder)
    wanted = arguments.only.split(",") if arguments.only else list(FAMILIES)
    names = [name for name in wanted if FAMILIES[name].runs_on(arguments.device)]
    started, results = time.monotonic(), []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for batch in batches(names):
        for result in run_batch(batch, arguments.device, arguments.patience, started + arguments.limit_s):
            results.append(result)
            _say(result, arguments.out)
    failed = [f"{result['family']}/{result['case']}" for result in results if not result["ok"]]
    _say(
        {"passed": len(results) - len(failed), "failed": failed, "seconds": round(time.monotonic() - started)},
        arguments.out,
    )
    return 1 if failed else 0


def _say(line: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(line, default=str)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    if out is not None:
        with out.open("a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
