"""The numbers of the cost model, each with where it comes from: `constants.json` beside this file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path

DATA = Path(__file__).with_name("constants.json")
HOW = ("fitted", "measured", "assumed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Everything that the cost model does not compute.

    Units: `_us` microseconds; `_gbps` GB/s; a `_fraction` is of the data sheet's value (peak FLOP/s, memory or NVLink
    bandwidth), so that it carries over to another GPU; `own_tiles` and
    `stream_tiles` rates of our tiles relative to the tensor cores' rate in cuBLAS.
    Source: `constants.json`, entry of the same name.
    """

    gemm_mma_fraction: float
    gemm_128_wide: float
    gemm_64_wide: float
    gemm_split_k_gbps: float
    gemm_launch_us: float
    power_fraction: float
    power_time_us: float
    hbm_fraction: float
    hbm_fill_exponent: float
    nccl_ll_us: float
    nccl_ll_fraction: float
    nccl_ll_max_bytes: float
    nccl_simple_us: float
    nccl_all_reduce_fraction: float
    nccl_reduce_scatter_fraction: float
    nccl_all_gather_fraction: float
    nccl_step_us: float
    nccl_node_us: float
    nccl_network_fraction: float
    copy_best_fraction: float
    push_fraction: float
    push_block_fraction: float
    copy_engine_fraction: float
    copy_engine_chunk_us: float
    copy_engine_first_byte_us: float
    remote_read_fraction: float
    flag_us: float
    own_gemm_factor: float
    overlap_exponent: float
    copy_out_us: float
    partial_us: float
    reduction_start_us: float
    push_interference: float
    copy_engine_interference: float
    tile_reduce_gbps: float
    proxy_us: float
    network_fraction: float
    emulated_fraction: float
    across_fixed_us: float
    across_factor: float
    attention_fraction: float
    tile_start_us: float
    tile_panel_us: float
    cluster_us: float
    mailbox_us: float
    sm_load_gbps: float
    stream_start_us: float
    stream_launch_us: float
    stream_link_fraction: float
    stream_overlap: float
    stream_turns: float
    stream_reread: float
    stream_exponent: float
    gather_gemm_factor: float
    gather_push_fraction: float
    gather_copy_fraction: float
    gather_copy_us: float
    gather_arrival_us: float
    gather_gate_us: float
    own_tiles: Mapping[str, float] = field(hash=False)
    stream_tiles: Mapping[str, float] = field(hash=False)

    def with_values(self, values: Mapping[str, float]) -> Constants:
        """A copy with some values replaced."""
        return replace(self, **values)  # type: ignore[arg-type]


def read(text: str) -> Constants:
    """Constants from JSON text of the form `{name: {"value", "how", "source"}}`.

    Raises: ValueError for missing or unknown names, or an entry that does not say how and where it was got.
    """
    entries: dict[str, dict[str, object]] = json.loads(text)
    names = {one.name for one in fields(Constants)}
    if set(entries) != names:
        raise ValueError(
            f"constants.json: missing {sorted(names - set(entries))}, unknown {sorted(set(entries) - names)}"
        )
    for name, entry in entries.items():
        if entry.get("how") not in HOW or not entry.get("source"):
            raise ValueError(f"constants.json: {name} needs a source and a how out of {HOW}")
    values = {name: entry["value"] for name, entry in entries.items()}
    return Constants(**values)  # type: ignore[arg-type]


@cache
def constants() -> Constants:
    """The constants of this version of the package."""
    return read(DATA.read_text())
