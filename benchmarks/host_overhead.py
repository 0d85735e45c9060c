"""`python -m benchmarks.host_overhead --out FILE`: what an operator call costs the host, and what it is made of.

Starts one process a GPU. One JSON line a rank and table, microseconds a call: the operators by every way that leads to
a launch, the parts of the shortest, bare launches of an empty kernel with arguments of several sizes, and a compiled
chain of layers with and without calls below torch's dispatcher. Gathers as planned and by other variants. `nothing` is
an operator of the same schema that returns at once: what torch's dispatcher costs a call by hand. The least of several
batches, each short enough for the launch queue. With `--shared` all processes have the first GPU, which lets them run
by turns, at the host's same cost.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN
from torch._inductor.utils import fresh_cache
from torch.distributed._functional_collectives import all_reduce

from benchmarks.by_turns import SharedPlatform
from mkcompile import codegen
from mkcompile.backend import mkernel
from mkcompile.ops.groups import find
from mkcompile.ops.registry import Call, Site, call_types, overload, set_launcher
from mkcompile.runtime import driver, nvrtc
from mkcompile.runtime.agree import Agreement
from mkcompile.runtime.dispatch import Dispatch
from mkcompile.runtime.form import Form
from mkcompile.runtime.gather_form import GatherForm
from mkcompile.runtime.gather_operation import GatherOperation
from mkcompile.runtime.gather_schedule import GatherChoice, Variant, fastest_gather
from mkcompile.runtime.host import contiguous_strides
from mkcompile.runtime.kernel import OPTIONS
from mkcompile.runtime.launcher import Launcher
from mkcompile.runtime.operation import Operation
from mkcompile.runtime.tactics import Tactic, Tactics

_BATCHES, _CALLS = 20, 100
# Where ranks share a GPU a launch takes some of the driver's turns.
_BATCHES_BY_TURNS, _CALLS_BY_TURNS = 6, 24
_TABLES = ("bare_launches", "ways", "parts", "compiled_layer")
_ROWS = 64
_LAYERS = 8
_PARAMETER_BYTES = (64, 512, 1024, 2048, 4000)
_KEY = "key"
_CALLED: tuple[tuple[str, Variant | None], ...] = (
    ("gemm_all_reduce", None), ("gemm_reduce_scatter", None), ("all_gather_gemm", None), ("all_gather_gemm", "push"),
    ("all_gather_gemm", "copy_engine"), ("all_gather_gemm", "library"),
)  # fmt: skip


def best_us(run: Callable[[], object], calls: int = _CALLS) -> float:
    """Host time of a call while the device works; the ranks begin each batch together."""
    best, by_turns = float("inf"), dist.get_backend() == "gloo"
    calls = min(calls, _CALLS_BY_TURNS) if by_turns else calls
    for _ in range(_BATCHES_BY_TURNS if by_turns else _BATCHES):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - started) / calls)
    return round(best * 1e6, 2)


@dataclass(slots=True)
class GathersBy:
    """The planner, but gathers go by one variant."""

    planned: Tactics
    variant: Variant

    def __call__(self, call: Call, form: Form, max_grid: int) -> Tactic | None:
        return self.planned(call, form, max_grid)

    def gather(self, call: Call, form: GatherForm, max_grid: int) -> GatherChoice | None:
        return fastest_gather(form.config, form.size, max_grid, form.returned, self.variant)


@contextmanager
def gathers_by(launcher: Launcher, variant: Variant | None) -> Iterator[None]:
    """Within it new gathers go by the variant; None: as planned."""
    planned = launcher._tactics
    launcher._operations.clear()
    launcher._tactics = planned if variant is None else GathersBy(planned, variant)
    try:
        yield
    finally:
        launcher._operations.clear()
        launcher._tactics = planned


def arguments_of(operator: str) -> tuple[Any, ...]:
    """A call of a product so small that the device never makes the host wait."""
    x = torch.ones(_ROWS, _ROWS, device="cuda", dtype=torch.bfloat16)
    if operator == "all_gather_gemm":
        return (x, [x.t()], [None], [0], 0, False, dist.get_world_size(), "0", _KEY)
    options = ("sum", dist.get_world_size(), "0", _KEY)
    if operator == "gemm_all_reduce":
        return ([x], [x.t()], None, *options)
    return ([x], [x.t()], None, [_ROWS, _ROWS], 0, *options)


@contextmanager
def nothing_like(operator: str, result: object) -> Iterator[Callable[..., object]]:
    """An operator of the same schema that returns a result at once."""
    library = torch.library.Library("mkcompile_nothing", "FRAGMENT")
    library.define(operator + call_types()[operator].SCHEMA)  # type: ignore[no-untyped-call]
    library.impl(operator, lambda *_: result, "CUDA")  # type: ignore[no-untyped-call]
    yield getattr(torch.ops.mkcompile_nothing, operator).default
    library._destroy()  # type: ignore[no-untyped-call]


def ways(operator: str, launcher: Launcher, variant: Variant | None = None) -> dict[str, float]:
    """Every way to a launch."""
    call_type, arguments = call_types()[operator], arguments_of(operator)
    dispatched, site, short = overload(call_type), Site(operator, fixed=True), launcher.shortcut(call_type)
    assert short is not None
    with gathers_by(launcher, variant), nothing_like(operator, dispatched(*arguments)) as nothing:
        for _ in range(2):
            site(*arguments)
        return {
            "dispatcher": best_us(lambda: dispatched(*arguments)),
            "nothing": best_us(lambda: nothing(*arguments)),
            "shortcut": best_us(lambda: short(*arguments)),
            "site": best_us(lambda: site(*arguments)),
            "site_batches_of_10": best_us(lambda: site(*arguments), calls=10),
        }


def parts(operator: str, launcher: Launcher, variant: Variant | None = None) -> dict[str, float]:
    """What the shortest way asks of torch and the driver."""
    arguments = arguments_of(operator)
    with gathers_by(launcher, variant):
        result = overload(call_types()[operator])(*arguments)  # kept, for the launch that is repeated
        (operation,) = launcher._operations.values()
    assert isinstance(operation, (Operation, GatherOperation))
    chain, host = operation.device.chain, operation.device.host
    stream = host.current_stream()
    out = result if isinstance(result, Tensor) else result[0]
    launch: Any = next(one for addresses, one in operation.launches.items() if out.data_ptr() in addresses)
    if isinstance(operation, Operation):
        allocate: Callable[[], object] = operation.allocate
        launched: Callable[[], object] | None = partial(launch.run, stream)
    else:
        strides = contiguous_strides(operation.form.out_shapes[0])
        allocate = partial(host.empty, operation.form.out_shapes[0], strides, out.dtype)
        # the library's products are calls of torch, which need their tensors
        launched = partial(launch.run, None, stream, False) if operation.kernel is not None else None
    return {
        "run": best_us(lambda: operation.run(*arguments[:3])),
        **({} if launched is None else {"launch": best_us(launched)}),
        "event": best_us(lambda: chain.leave(stream, 0)),
        "capture": best_us(lambda: chain.enter(stream)),
        "allocation": best_us(allocate),
        "group": best_us(lambda: operation.process_group() is find("0")),
        "report": best_us(operation.group.workspace.board.check),
        "stream": best_us(host.current_stream),
        "device": best_us(host.current_device),
    }


def bare_launches() -> dict[str, float]:
    """An empty kernel by the call that operators use, by the size of its arguments, and by the older call."""
    times: dict[str, float] = {}
    launch, older = driver.library().cuLaunchKernelEx, driver.library().cuLaunchKernel
    attribute = driver.cooperative_attribute()
    for size_bytes in _PARAMETER_BYTES:
        function, block = empty_kernel(size_bytes), ctypes.create_string_buffer(size_bytes)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        for kind in ("plain", "cooperative"):
            config = driver.LaunchConfig(
                grid=(64, 1, 1), block=(384, 1, 1), stream=torch.cuda.current_stream().cuda_stream,
                attributes=ctypes.pointer(attribute), num_attributes=int(kind == "cooperative"),
            )  # fmt: skip
            taken = (ctypes.byref(config), function, parameters, None)
            driver.check("cuLaunchKernelEx", launch(*taken))
            times[f"{size_bytes}_{kind}"] = best_us(lambda: launch(*taken))  # noqa: B023 (called at once)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    times["4000_older"] = best_us(lambda: older(function, 64, 1, 1, 384, 1, 1, 0, stream, parameters, None))
    times["foreign_call"] = best_us(lambda: driver.library().cuDriverGetVersion(None))
    return times


def empty_kernel(parameter_bytes: int) -> ctypes.c_void_p:
    """A kernel that returns, and takes so many bytes."""
    source = (
        f"struct Block {{ char bytes[{parameter_bytes}]; }};\n"
        'extern "C" __global__ void empty(const __grid_constant__ Block block) {}\n'
    )
    image = nvrtc.compile_cubin(f"empty{parameter_bytes}", source, {}, OPTIONS).image
    return driver.load_function(image, "empty", 0, torch.cuda.current_device())


def compiled_layer() -> dict[str, float]:
    """Host time of one layer (product, all-reduce, a pointwise kernel) in a compiled chain of them."""
    weights = [torch.ones(_ROWS, _ROWS, device="cuda", dtype=torch.bfloat16) for _ in range(_LAYERS)]

    def chain(x: Tensor) -> Tensor:
        for weight in weights:
            reduced: Tensor = all_reduce(x @ weight.t(), "sum", "0")  # type: ignore[arg-type]
            x = torch.relu(reduced + x)
        return x

    x, times = torch.ones_like(weights[0]), {}
    for kind in ("planned_results", "below_dispatcher", "through_dispatcher", "inductor"):
        if kind == "through_dispatcher":
            CUSTOM_EXTERN_KERNEL_CODEGEN.clear()
        torch._dynamo.reset()
        options = {"mkernel.fuse": "always", "mkernel.results": "planned" if kind == "planned_results" else "ordinary"}
        backend = {"backend": "inductor"} if kind == "inductor" else {"backend": mkernel, "options": options}
        with fresh_cache(), torch.no_grad():
            compiled = torch.compile(chain, **backend)
            for _ in range(3):
                compiled(x)
            times[kind] = round(best_us(lambda: compiled(x), calls=_CALLS // _LAYERS) / _LAYERS, 2)  # noqa: B023
    codegen.install()
    return times


def worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One rank."""
    device = torch.device("cuda", 0 if options.shared else rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if options.shared else "nccl", init_method=f"file://{folder}/rendezvous", rank=rank,
        world_size=options.world, device_id=None if options.shared else device,
    )  # fmt: skip
    launcher = Launcher(SharedPlatform() if options.shared else None)
    set_launcher(Dispatch(Agreement(), launcher))
    tables: dict[str, Callable[[], dict[str, float]]] = {"bare_launches": bare_launches}
    for operator, variant in _CALLED:
        name = f"{operator} {variant}" if variant else operator
        tables[f"{name}/ways"] = partial(ways, operator, launcher, variant)
        tables[f"{name}/parts"] = partial(parts, operator, launcher, variant)
    tables["compiled_layer"] = compiled_layer
    common = {
        "commit": options.commit, "torch": torch.__version__, "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    with options.out.with_suffix(f".{rank}.jsonl").open("w", encoding="utf-8") as file:
        for name, measure in tables.items():
            if options.table and name.split("/")[-1] not in options.table:
                continue
            file.write(json.dumps({"table": name, "rank": rank, "us": measure(), **common}) + "\n")
            file.flush()
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Start the ranks, wait for them, and put their lines together."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_overhead", description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--shared", action="store_true", help="all ranks on one GPU")
    parser.add_argument("--table", choices=_TABLES, action="append", help="may be repeated; default: all")
    parser.add_argument("--commit", default="unknown", help="written into every line")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.shared:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    with tempfile.TemporaryDirectory(prefix="mkcompile-host-") as folder:
        mp.spawn(worker, args=(options, folder), nprocs=options.world)
    texts = [options.out.with_suffix(f".{rank}.jsonl").read_text(encoding="utf-8") for rank in range(options.world)]
    options.out.write_text("".join(texts), encoding="utf-8")
    sys.stdout.write("".join(texts))


if __name__ == "__main__":
    main(sys.argv[1:])
