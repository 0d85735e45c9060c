"""Fits the cost model: `python -m mkcompile.plan.fit benchmarks/results/2xh200` writes `constants.json`.

Every second row is fitted; the others are left for `tests/plan/test_prediction.py`. Deterministic: a seeded search that
makes the largest relative errors small.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mkcompile.plan.collective_cost import nccl_us
from mkcompile.plan.constants import DATA, Constants, constants
from mkcompile.plan.fit_stream import BOUNDS as STREAM_BOUNDS
from mkcompile.plan.fit_stream import TILE_BOUNDS, predict_stream, stream_rows
from mkcompile.plan.fused_cost import Case, Machine
from mkcompile.plan.gemm_cost import Gemm, cublas_us
from mkcompile.plan.plan import Roles, Tile
from mkcompile.plan.topology import PRESETS, Span
from mkcompile.plan.waves import Reduction

TOPOLOGY = PRESETS["2xh200"]
PAIR = Span(num_nodes=1, per_node=2)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured time. `kind`: `gemm`, or the collective behind or before the GEMM. Units: microseconds."""

    kind: str
    gemm: Gemm
    us: float
    note: str = ""


def predict(row: Row, using: Constants) -> float:
    """What the model says for a row, in microseconds."""
    gemm_us = cublas_us(row.gemm, TOPOLOGY.gpu, using) if row.gemm.k else 0.0
    if row.kind == "gemm":
        return gemm_us
    columns = row.gemm.k if row.kind == "all_gather" else row.gemm.n
    return gemm_us + nccl_us(row.kind, 2 * row.gemm.m * columns, PAIR, TOPOLOGY, using)


def read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of one results file."""
    found: list[dict[str, Any]] = json.loads((folder / name).read_text())["rows"]
    return found


def gemm_rows(folder: Path) -> list[Row]:
    """GEMMs alone, large then small."""
    large = [row for row in read_rows(folder, "ops-baseline.json") if row["name"] in ("gemm", "ag:gemm only")]
    rows = [_large("gemm", row) for row in large]
    return rows + [_small("gemm", row, "gemm") for row in read_rows(folder, "small-baseline.json")]


def unfused_rows(folder: Path) -> list[Row]:
    """cuBLAS with NCCL behind or before it, large then small."""
    names = {"gemm+ar nccl": "all_reduce", "gemm+rs nccl": "reduce_scatter", "ag+gemm nccl": "all_gather"}
    rows = [_large(names[row["name"]], row) for row in read_rows(folder, "ops-baseline.json") if row["name"] in names]
    small = read_rows(folder, "small-baseline.json")
    rows += [_small("all_reduce", row, "nccl_ar") for row in small]
    rows += [_small("reduce_scatter", row, "nccl_rs") for row in small if "nccl_rs" in row]
    return sorted(rows, key=lambda row: row.kind)


def _large(kind: str, row: Mapping[str, Any]) -> Row:
    m, n, k = row["shape"]
    return Row(kind=kind, gemm=Gemm(m=m, n=n, k=k), us=row["ms"] * 1e3, note=row.get("note", ""))


def _small(kind: str, row: Mapping[str, Any], column: str) -> Row:
    return Row(kind=kind, gemm=Gemm(m=row["M"], n=row["N"], k=row["K"]), us=row[column])


def fitted_half(rows: Sequence[_T]) -> Sequence[_T]:
    """The rows that are fitted."""
    return rows[1::2]


def held_out_half(rows: Sequence[_T]) -> Sequence[_T]:
    """The rows that only tests look at."""
    return rows[0::2]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRow:
    """One launch of our kernels: `final` and `copy_out` as of `Reduction`; `lag` in tiles. Units: microseconds."""

    operator: str
    gemm: Gemm
    tile: Tile
    blocks: int
    final: float
    copy_out: bool
    lag: int
    us: float


_CONTENDERS = {
    ("gemm_reduce_scatter", "mkcompile"): (0.0, False),
    ("gemm_all_reduce", "mkcompile_direct"): (1.0, False),
    ("gemm_all_reduce", "mkcompile_staged"): (1.0, True),
}


def fused_rows(folder: Path, name: str = "ops.jsonl") -> list[FusedRow]:
    """Our kernels in the regime of all other rows: long loops with no pauses. By size, so that each half has all."""
    found = []
    for line in (folder / name).read_text().splitlines():
        row = json.loads(line)
        kind = _CONTENDERS.get((row["op"], row["contender"]))
        if kind is None or row["regime"] != "sustained" or not row["checked"]:
            continue
        shape, grid, lag = row["variant"].split()[:3]
        rows, columns = map(int, shape.split("x"))
        found.append(
            FusedRow(
                operator=row["op"],
                gemm=Gemm(m=row["M"], n=row["N"], k=row["K"]),
                tile=Tile(rows=rows, columns=columns),
                blocks=int(grid.removeprefix("grid")),
                final=kind[0],
                copy_out=kind[1],
                lag=int(lag.removeprefix("lag")),
                us=row["ms"] * 1e3,
            )
        )
    return sorted(found, key=lambda one: (one.operator, one.copy_out, one.gemm.flops, one.gemm.k))


def predict_fused(row: FusedRow, using: Constants) -> float:
    """What the model says of it, on two GPUs."""
    case = Case(
        gemm=row.gemm,
        span=PAIR,
        tile=row.tile,
        roles=Roles(compute=row.blocks, reserve=TOPOLOGY.gpu.num_sms - row.blocks),
        machine=Machine(topology=TOPOLOGY, constants=using),
    )
    return Reduction(case=case, final=row.final, copy_out=row.copy_out, lag=row.lag / row.blocks).us()


def error(pairs: Iterable[tuple[float, float]]) -> float:
    """The 8-norm of the logarithms of predicted over measured: near the largest one, but smooth."""
    logs = np.array([math.log(predicted / measured) for predicted, measured in pairs])
    return float(np.mean(logs**8) ** 0.125)


def spread(pairs: Iterable[tuple[float, float]]) -> float:
    """The 2-norm of the same."""
    logs = np.array([math.log(predicted / measured) for predicted, measured in pairs])
    return float(np.mean(logs**2) ** 0.5)


Bounds = Mapping[str, tuple[float, float]]


def search(start: Constants, bounds: Bounds, objective: Callable[[Constants], float], steps: int) -> Constants:
    """Random steps from the best point so far, wider after a gain and narrower after none.

    Names with a dot are those of one tile: `stream_tiles.64x32`.
    """
    random = np.random.default_rng(0)
    names = list(bounds)
    low, high = np.array([bounds[name] for name in names]).T
    point = (low + high) / 2  # not the values of the last fit: the outcome must not depend on them
    best, width = objective(_placed(start, names, point)), 0.1
    for _ in range(steps):
        mask = random.random(len(names)) < 0.5
        tried = np.clip(point + width * (high - low) * random.normal(size=len(names)) * mask, low, high)
        value = objective(_placed(start, names, tried))
        better = value < best
        point, best = (tried, value) if better else (point, best)
        width = min(width * 1.5, 0.3) if better else max(width * 0.97, 0.003)
    return _placed(start, names, point)


def _placed(start: Constants, names: Sequence[str], point: Iterable[float]) -> Constants:
    values = {name: float(v) for name, v in zip(names, point, strict=True)}
    plain = {name: v for name, v in values.items() if "." not in name}
    tiles = {name.partition(".")[2]: v for name, v in values.items() if "." in name}
    changed = start.with_values(plain)
    return replace(changed, stream_tiles={**start.stream_tiles, **tiles}) if tiles else changed


GEMM_BOUNDS: Bounds = {
    "gemm_mma_fraction": (0.7, 0.85),
    "gemm_128_wide": (0.9, 1.0),
    "gemm_64_wide": (0.6, 1.0),
    "gemm_split_k_gbps": (1e3, 2e4),
    "gemm_launch_us": (1.0, 5.0),
    "power_fraction": (0.0, 0.3),
    "power_time_us": (50.0, 3000.0),
    "hbm_fraction": (0.7, 1.0),
    "hbm_fill_exponent": (0.0, 1.0),
}
NCCL_BOUNDS: Bounds = {
    "nccl_ll_us": (3.0, 15.0),
    "nccl_ll_fraction": (0.1, 0.7),
    "nccl_simple_us": (10.0, 60.0),
    "nccl_all_reduce_fraction": (0.4, 0.9),
    "nccl_reduce_scatter_fraction": (0.4, 0.9),
    "nccl_all_gather_fraction": (0.4, 0.9),
}
FUSED_BOUNDS: Bounds = {
    "own_gemm_factor": (0.9, 1.01),
    "copy_out_us": (0.0, 4.0),
}


def fit(folder: Path, steps: int = 6000) -> Constants:
    """GEMMs first, then NCCL on top of them, then the fused kernels."""
    alone, unfused = fitted_half(gemm_rows(folder)), fitted_half(unfused_rows(folder))
    using = constants()
    using = search(using, GEMM_BOUNDS, lambda c: error((predict(row, c), row.us) for row in alone), steps)
    using = search(using, NCCL_BOUNDS, lambda c: error((predict(row, c), row.us) for row in unfused), steps)
    own = [row for name in ("ops_first.jsonl", "ops.jsonl") for row in fitted_half(fused_rows(folder, name))]
    using = search(using, FUSED_BOUNDS, lambda c: error((predict_fused(row, c), row.us) for row in own), steps)
    streams = fitted_half([row for row in stream_rows(folder) if row.is_offered])
    bounds = {**STREAM_BOUNDS, **{f"stream_tiles.{name}": one for name, one in TILE_BOUNDS.items()}}
    # the mean square and not the worst: with so many variants it is the choice among the good ones that counts
    return search(using, bounds, lambda c: spread((predict_stream(row, c), row.us) for row in streams), steps // 2)


def write(fitted: Constants, path: Path = DATA) -> None:
    """Put fitted values into the data file, four digits each; everything else in it stays."""
    entries = json.loads(path.read_text())
    for name in (*GEMM_BOUNDS, *NCCL_BOUNDS, *FUSED_BOUNDS, *STREAM_BOUNDS):
        entries[name]["value"] = float(f"{getattr(fitted, name):.4g}")
    entries["stream_tiles"]["value"] = {name: float(f"{v:.4g}") for name, v in fitted.stream_tiles.items()}
    path.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    write(fit(Path(sys.argv[1])))
