"""`python -m mkcompile warmup`: compile kernels ahead of their first use. Needs NVRTC, but no GPU."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

from rich.console import Console

from mkcompile.config import settings
from mkcompile.errors import CompileError, UnsupportedDeviceError
from mkcompile.runtime.gather_engine import engine_cubin
from mkcompile.runtime.kernel import OPTIONS, CompiledKernel, compile_kernel, translation_unit
from mkcompile.runtime.kernel_cache import kept
from mkcompile.runtime.kernel_config import KernelConfig
from mkcompile.runtime.network_choice import transport_of_kernels
from mkcompile.runtime.network_gather import mover_cubin
from mkcompile.runtime.offered import DTYPES, LAYOUTS, NETWORKS, all_configs, launched_configs

_TELL_EVERY = 10


def warm_up(configs: Iterable[KernelConfig], num_processes: int) -> Iterator[CompiledKernel]:
    """Compile into the cache folder; yields each kernel as it is done, first those that are there already.

    Raises: CompileError; UnsupportedDeviceError where NVRTC is not installed.
    """
    missing: dict[str, list[KernelConfig]] = {}  # gathers over nodes are one unit, however ranks lie on them
    for config in configs:
        cubin = kept(unit := translation_unit(config), OPTIONS)
        if cubin is None:
            missing.setdefault(unit, []).append(config)
        else:
            yield CompiledKernel(config=config, cubin=cubin)
    if not missing:  # a process takes seconds to start
        return
    with ProcessPoolExecutor(min(num_processes, len(missing)), mp_context=get_context("spawn")) as pool:
        compiled = pool.map(compile_kernel, [same[0] for same in missing.values()], chunksize=1)
        for kernel, same in zip(compiled, missing.values(), strict=True):
            yield from (CompiledKernel(config=one, cubin=kernel.cubin) for one in same)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mkcompile warmup", description="Compile kernels ahead of their first use."
    )
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=DTYPES)
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS), choices=LAYOUTS, help="of the weights")
    parser.add_argument(
        "--network", nargs="+", choices=NETWORKS,
        help="ranks on one node (none), one on each of several (flat), several on each (hierarchical); default: none, "
        "and all where MKCOMPILE_NETWORK names one",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="every kernel there is, also those for tests and benchmarks")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile at once")
    parser.add_argument("--list", action="store_true", help="name the kernels and compile none")
    return parser


def chosen_configs(chosen: argparse.Namespace) -> list[KernelConfig]:
    """Which kernels; traced ones where launches would ask for those (MKCOMPILE_TRACE)."""
    networks = chosen.network or (NETWORKS if transport_of_kernels() else ("none",))
    configs = all_configs() if chosen.all else launched_configs(chosen.dtype, chosen.layout, networks)
    return [replace(one, trace=settings().trace) for one in configs]


def _left_text(ends: Sequence[float], num_kernels: int) -> str:
    """After some kernels how long the rest takes at the pace of these; `ends` begins with the start."""
    done = len(ends) - 1
    if done % _TELL_EVERY or done == num_kernels:
        return ""
    left_s = (ends[-1] - ends[-1 - _TELL_EVERY]) / _TELL_EVERY * (num_kernels - done)
    return f", about {left_s / 60:.0f} min left" if left_s >= 60 else f", about {left_s:.0f} s left"


def main(arguments: Sequence[str]) -> int:
    """0 where all compiled, 1 where one did not, 2 where there is no compiler."""
    chosen = _parser().parse_args(arguments)
    configs = chosen_configs(chosen)
    console = Console()
    if chosen.list:
        for config in configs:
            console.print(config.name)
        return 0
    num_jobs = max(1, chosen.jobs)
    console.print(f"{len(configs)} kernels, {num_jobs} at once, each a second or more of a core; what is there is kept")
    started = time.monotonic()
    ends = [started]
    try:
        for number, kernel in enumerate(warm_up(configs, num_jobs), start=1):
            ends.append(time.monotonic())
            console.print(
                f"{number:4} of {len(configs)}  {kernel.config.name}  {kernel.cubin.resources.registers} registers"
                + _left_text(ends, len(configs))
            )
        engine_cubin()
        if any(one.network != "none" for one in configs):
            mover_cubin()
    except KeyboardInterrupt:
        console.print(
            f"stopped; {len(ends) - 1} of {len(configs)} kernels are there, and the next run starts from them"
        )
        return 1
    except UnsupportedDeviceError as error:
        Console(stderr=True).print(f"[red]{error}[/red]")
        return 2
    except CompileError as error:
        Console(stderr=True).print(f"[red]{error}[/red]")
        return 1
    console.print(f"{len(configs)} kernels in {settings().cache_dir / 'kernels'}, {time.monotonic() - started:.1f} s")
    return 0
