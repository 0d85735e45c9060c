"""Plans for a symbolic m: one a bucket, equal on all ranks, no gaps from 1 to 65,536 rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkcompile.plan import PRESETS, UNFUSED, PlanTable, Policy, Refusal, judge_for, predict
from mkcompile.plan.buckets import BUCKETS, MAX_ROWS, at_bucket, bucket, entry_name
from mkcompile.plan.decide import unfused_plan
from mkcompile.plan.disk import Measured, Results
from tests.plan.problems import OPERATORS, problem

PAIR = PRESETS["2xh200"]
SYMBOLIC = problem("gemm_all_reduce", 0, 8192, 3584)


@given(st.integers(1, MAX_ROWS))
def test_every_m_has_the_smallest_bucket_that_holds_it(rows: int) -> None:
    bound = bucket(rows)
    assert bound in BUCKETS and bound >= rows
    assert all(other < rows for other in BUCKETS if other < bound)
    assert rows <= 4 or bound < 2 * rows


def test_m_above_the_table_takes_the_last_bucket_and_zero_is_an_error() -> None:
    assert bucket(10 * MAX_ROWS) == MAX_ROWS
    with pytest.raises(ValueError, match="at least 1"):
        bucket(0)


def test_bucket_bounds_can_be_divided_over_the_ranks() -> None:
    one = problem("gemm_reduce_scatter", 1, 8192, 3584, world_size=6, outer=5)
    assert all(at_bucket(replace(one, m=rows), rows).m % 30 == 0 for rows in BUCKETS)


def test_one_plan_for_all_m_of_a_bucket() -> None:
    table = PlanTable(topology=PAIR)
    plans = {table.plan(replace(SYMBOLIC, m=rows)) for rows in (4097, 4500, 5120)}
    assert len(plans) == 1
    assert len(table.fill(SYMBOLIC)) == len(BUCKETS)


@pytest.mark.parametrize("operator", OPERATORS)
def test_lazy_and_filled_tables_are_equal(operator: str) -> None:
    one = problem(operator, 0, 4096, 2048)
    filled = PlanTable(topology=PAIR)
    filled.fill(one)
    lazy = PlanTable(topology=PAIR)
    for rows in (1, 77, 1000, 8192, 65536):
        lazy.plan(replace(one, m=rows))
    lazily, filled_text = lazy.to_json(), filled.to_json()
    assert lazily != filled_text
    assert all(lazy.plan(replace(one, m=m)) == filled.plan(replace(one, m=m)) for m in (1, 77, 1000, 8192, 65536))


def test_symbolic_m_fuses_where_some_bucket_gains() -> None:
    saving = judge_for(PAIR)(SYMBOLIC)
    assert isinstance(saving, float) and saving > 0
    told = predict(SYMBOLIC, PAIR)
    assert told.refusal is None and told.fused_s is not None
    assert told.unfused_s - told.fused_s == pytest.approx(told.saving_s)
    table = PlanTable(topology=PAIR)
    assert table.plan(replace(SYMBOLIC, m=8192)).fused


def test_symbolic_m_is_refused_for_the_same_reasons() -> None:
    judge = judge_for(PAIR)
    assert judge(replace(SYMBOLIC, dtype="float32")) is Refusal.DTYPE
    assert judge_for(PAIR, Policy(available=frozenset()))(SYMBOLIC) is Refusal.NO_KERNEL


def test_a_bucket_that_loses_stays_unfused_at_run_time() -> None:
    large_only = Policy(available=frozenset({"gemm_all_reduce/direct/128x256x64"}))
    table = PlanTable(topology=PAIR, policy=large_only)
    assert table.plan(replace(SYMBOLIC, m=1)).variant == UNFUSED
    assert table.plan(replace(SYMBOLIC, m=8192)).fused


def test_what_was_measured_beside_a_small_reserve_is_not_launched_where_a_larger_one_leaves_it_no_room() -> None:
    """64 clusters of two: on 116 SMs they would be two waves, for which no plan is made."""
    site, tuned = problem("all_gather_gemm", 64, 4096, 4096), Results()
    shared = PlanTable(topology=PAIR).launch(site)
    assert (shared.variant, shared.split, shared.grid) == ("stream", 2, 128)
    for plan, seconds in ((shared, 1e-6), (unfused_plan(site, PAIR), 1.0)):
        tuned.add(entry_name(site), Measured(plan=plan, seconds=seconds))
    assert PlanTable(topology=PAIR, tuned=tuned).launch(site) == shared
    policy = Policy(reserve_sms=16)
    launched = PlanTable(topology=PAIR, tuned=tuned, policy=policy).launch(site)
    assert launched == PlanTable(topology=PAIR, policy=policy).launch(site) and launched.grid == 64


def test_never_plans_nothing() -> None:
    table = PlanTable(topology=PAIR, policy=Policy(fuse="never"))
    assert not any(plan.fused for plan in table.fill(SYMBOLIC).values())
