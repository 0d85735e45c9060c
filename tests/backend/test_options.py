"""The entry point, options and modes, the user's own passes, and the pass alone."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed import _functional_collectives as funcol

import mkcompile
from mkcompile import backend
from mkcompile.config import NETWORKS, Options, read_settings, split_options
from mkcompile.errors import OptionError
from mkcompile.ops.problem import Problem
from mkcompile.passes.fusion_pass import FusionPass, group_sizes
from mkcompile.passes.reason import Reason
from mkcompile.passes.save_reduced import SaveReduced
from mkcompile.plan.decide import Policy
from mkcompile.runtime.proxy.abi import TRANSPORTS

BFLOAT16: dict[str, Any] = {"dtype": "bfloat16", "dtype_bytes": 2}
HOOKS = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass")


# Nothing but GEMMs and collectives: Inductor has no C++ to compile.
def row_parallel(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", "0")


def no_collective(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 8), torch.randn(8, 32)


class CountingPass(CustomGraphPass):
    """Counts its graphs and the fused operators that it sees in them."""

    def __init__(self) -> None:
        self.num_graphs = self.num_fused = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.num_graphs += 1
        self.num_fused += num_fused_in(graph)

    def uuid(self) -> str:
        return "counting"


def num_fused_in(graph: fx.Graph) -> int:
    return sum("mkcompile" in str(node.target) for node in graph.nodes)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the FusionPass of any later compile reports; caches off, so that passes run."""
    graphs: list[Any] = []
    run = FusionPass.__call__

    def watched(self: FusionPass, graph: fx.Graph) -> None:
        run(self, graph)
        graphs.append(self.graphs[-1])

    monkeypatch.setattr(FusionPass, "__call__", watched)
    with inductor_config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield graphs


def fused(seen: list[Any]) -> list[str | None]:
    return [site.operator for sites in seen for site in sites]


def compile_and_run(function: Callable[..., Tensor], **how: Any) -> Tensor:
    """Where nothing else is asked for, whatever is legal is fused: the planner has no kernels for these fp32 inputs."""
    if how.get("backend") == "mkernel" and "mode" not in how:
        how["options"] = {"mkernel.fuse": "always", **how.get("options", {})}
    with torch.no_grad():
        return torch.compile(function, fullgraph=True, **how)(*inputs())


def run_python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_entry_point_works_without_importing_mkcompile() -> None:
    run_python(
        "import sys, torch\n"
        "assert 'mkernel' in torch._dynamo.list_backends()\n"
        "assert 'mkcompile' not in sys.modules\n"
        "f = torch.compile(lambda x: x @ x, backend='mkernel')\n"
        "x = torch.randn(8, 8)\n"
        "torch.testing.assert_close(f(x), x @ x)\n"
        "assert torch.ops.mkcompile.gemm_all_reduce.default is not None\n"
    )


def test_fuses_and_leaves_plain_graphs_alone(fake_world: int, seen: list[Any]) -> None:
    compile_and_run(row_parallel, backend="mkernel")
    compile_and_run(no_collective, backend="mkernel")
    assert [[site.operator for site in sites] for sites in seen] == [["gemm_all_reduce"], []]


def test_plain_model_says_so_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    fusion = FusionPass()
    with caplog.at_level(logging.INFO, "mkcompile"), inductor_config.patch(fx_graph_cache=False):
        compile_and_run(no_collective, backend="inductor", options={HOOKS[0]: fusion})
    assert "plain Inductor" in caplog.text
    assert fusion.report() == "graph 0: no collective: compiled as plain Inductor"


def test_report_names_each_collective_and_why(fake_world: int) -> None:
    fusion = FusionPass(Options(fuse="never"))
    assert "no graph was compiled yet" in fusion.report()
    with inductor_config.patch(fx_graph_cache=False):
        compile_and_run(row_parallel, backend="inductor", options={HOOKS[0]: fusion})
    assert "0 of 1 collectives fused" in fusion.report()
    assert Reason.POLICY_NEVER.value in fusion.report()
    assert "[16, 32]" in fusion.report()


@pytest.mark.parametrize(
    ("policy", "operators"), [("always", ["gemm_all_reduce"]), ("never", [None]), ("auto", [None])]
)
def test_policy_on_a_site_without_kernel(
    fake_world: int, seen: list[Any], policy: str, operators: list[str | None]
) -> None:
    compile_and_run(row_parallel, backend="mkernel", options={"mkernel.fuse": policy})
    assert fused(seen) == operators


@pytest.mark.parametrize("topology", ["probe", "8xh200"])
def test_auto_asks_the_planner_about_the_machine(fake_world: int, topology: str) -> None:
    gains = Problem(operator="gemm_reduce_scatter", m=16384, n=8192, k=4096, world_size=2, **BFLOAT16)
    no_kernel = replace(gains, dtype="float32", dtype_bytes=4)
    fusion = mkcompile.FusionPass(Options(topology=topology))
    assert isinstance(fusion._judge(gains), float)
    assert fusion._judge(no_kernel) is Reason.DTYPE


@pytest.mark.parametrize("topology", ["probe", "8xh200"])
def test_what_has_a_kernel_comes_first_whichever_machine_is_planned_for(
    fake_world: int, topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduction = Problem(operator="gemm_all_reduce", m=4096, n=4096, k=4096, world_size=2, **BFLOAT16)
    network = replace(reduction, operator="ffn", hidden=8192, activation="relu")
    always = mkcompile.FusionPass(Options(fuse="always", topology=topology))
    assert always._judge(reduction) > always._judge(network) > 0
    assert mkcompile.FusionPass(Options(topology=topology))._judge(network) is Reason.NO_KERNEL
    monkeypatch.setattr(backend, "policy_of", Policy)
    assert always._judge(network) > always._judge(reduction) > 0


def test_machine_is_part_of_the_cache_key(fake_world: int) -> None:
    pair = mkcompile.FusionPass(Options())
    other = mkcompile.FusionPass(Options())
    other._machine = "gb200nvl72"
    assert pair.uuid() == mkcompile.FusionPass().uuid()
    assert pair.uuid() != other.uuid()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mkernel.fsue": "auto"}, "valid: mkernel.fuse, mkernel.topology"),
        ({"mkernel.fuze": "auto"}, "did you mean mkernel.fuse?"),
        ({"mkernel.fuse": "sometimes"}, "auto, always, never"),
        ({"mkernel.fuse": "allways"}, "did you mean always?"),
        ({"mkernel.topology": 8}, "must be a name, got int"),
        ({"mkernel.results": "some"}, "ordinary, planned"),
        ({"mkernel.residuals": "some"}, "in_place, apart"),
        ({"max_autotun": True}, "did you mean max_autotune"),
        ({"fuse": "auto"}, "did you mean mkernel.fuse?"),
        ({"max_autotune": "yes"}, "got str should be bool"),
    ],
)
def test_wrong_option_is_an_error_that_says_what_is_right(options: dict[str, Any], message: str) -> None:
    # Dynamo wraps what a backend raises, and keeps the cause
    with pytest.raises((OptionError, torch._dynamo.exc.BackendCompilerFailed)) as caught:
        compile_and_run(no_collective, backend="mkernel", options=options)
    chain = [caught.value, caught.value.__cause__, getattr(caught.value, "inner_exception", None)]
    assert any(isinstance(one, OptionError) for one in chain), chain
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("FUSE", "1", "unknown setting MKCOMPILE_FUSE; valid: MKCOMPILE_ARENA_BYTES"),
        ("TIMEOUT", "1", "did you mean MKCOMPILE_TIMEOUT_S"),
        ("TIMEOUT_S", "nan", "MKCOMPILE_TIMEOUT_S must be finite, got nan"),
        ("ARENA_BYTES", "1G", "MKCOMPILE_ARENA_BYTES must be a whole number, such as 1073741824; got '1G'"),
        ("NETWORK", "foo:eth0", "MKCOMPILE_NETWORK must name one of auto, tcp, rc"),
        ("LOG_LEVEL", "loud", "must be one of DEBUG, INFO"),
    ],
)
def test_wrong_setting_is_an_error_that_says_what_is_right(name: str, text: str, message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        read_settings({f"MKCOMPILE_{name}": text})


def test_options_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(OptionError, match=re.escape("a dict, such as {'mkernel.fuse': 'always'}; got 'always'")):
        split_options("always")  # type: ignore[arg-type]


def test_settings_take_what_they_name() -> None:
    assert read_settings({"MKCOMPILE_LOG_LEVEL": "info"}).log_level == "INFO"
    assert set(NETWORKS) == {"auto", *TRANSPORTS}


def test_a_group_that_is_not_there_is_named(fake_world: int) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return funcol.all_reduce(x @ w, "sum", "77")

    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match=r"GroupError: .*named '77' on this rank, which has 0"
    ):
        compile_and_run(function, backend="mkernel")
    with pytest.raises(RuntimeError, match="Could not resolve the process group"):  # torch's own, where we do nothing
        compile_and_run(function, backend="mkernel", options={"mkernel.fuse": "never"})


def test_inductor_options_and_modes_reach_inductor(fake_world: int, seen: list[Any]) -> None:
    found: list[tuple[bool, bool]] = []

    def look(graph: fx.Graph) -> None:
        found.append((inductor_config.epilogue_fusion, inductor_config.max_autotune))

    compile_and_run(row_parallel, backend="mkernel", options={"epilogue-fusion": False, HOOKS[1]: look})
    torch._dynamo.reset()
    with inductor_config.patch({HOOKS[1]: look}):
        compile_and_run(row_parallel, backend="mkernel", mode="max-autotune-no-cudagraphs")
        torch._dynamo.reset()
        compile_and_run(row_parallel, backend="mkernel", mode="default")
    assert found == [(False, False), (True, True), (True, False)]
    assert fused(seen) == ["gemm_all_reduce", None, None]  # a mode leaves no room for options: auto


@pytest.mark.parametrize("lists", [True, False], ids=["hooks take lists", "hooks take one pass (torch 2.11)"])
@pytest.mark.parametrize("form", ["pass", "list", "tuple", "function"])
@pytest.mark.parametrize("place", ["options", "config"])
def test_users_own_passes_keep_working(
    fake_world: int, seen: list[Any], monkeypatch: pytest.MonkeyPatch, lists: bool, form: str, place: str
) -> None:
    if not lists:
        monkeypatch.setattr(backend, "_hooks_take_lists", lambda: False)
    before, after = CountingPass(), CountingPass()
    theirs = {"pass": before, "list": [before], "tuple": (before,), "function": before.__call__}[form]
    settings = {HOOKS[0]: theirs, HOOKS[1]: after}
    if place == "options":
        compile_and_run(row_parallel, backend="mkernel", options=settings)
    else:
        with inductor_config.patch(settings):
            compile_and_run(row_parallel, backend="mkernel")
    assert (before.num_graphs, before.num_fused) == (1, 0)
    assert (after.num_graphs, after.num_fused) == (1, 1)
    assert fused(seen) == ["gemm_all_reduce"]


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("mkcompile.passes.fusion_pass.source_digest", lambda: "other sources"),
        ("mkcompile.passes.fusion_pass.group_sizes", lambda: "0=4"),
        ("torch.__version__", "2.99"),
    ],
)
def test_uuid_covers(fake_world: int, monkeypatch: pytest.MonkeyPatch, where: str, value: Any) -> None:
    before = FusionPass().uuid()
    assert before == FusionPass().uuid() != FusionPass(Options(fuse="never")).uuid()
    monkeypatch.setattr(where, value)
    assert FusionPass().uuid() != before


@pytest.mark.parametrize("policy", [Policy(reserve_sms=7), Policy(available=frozenset({"gemm_all_reduce/staged"}))])
def test_uuid_covers_what_the_planner_may_do(fake_world: int, monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    before = mkcompile.FusionPass().uuid()
    monkeypatch.setattr(backend, "policy_of", lambda: policy)
    assert mkcompile.FusionPass().uuid() != before


def test_group_sizes_are_those_of_all_groups(fake_world: int) -> None:
    assert group_sizes() == "0=2"
    dist.new_group([0])
    assert group_sizes() == "0=2,1=1"


def test_chained_pass_without_uuid_turns_caching_off() -> None:
    assert backend.Chain([CountingPass(), FusionPass()]).uuid() == ("counting", FusionPass().uuid())
    assert backend.Chain([lambda graph: None, FusionPass()]).uuid() is None


@pytest.mark.parametrize("place", ["options", "config"])
def test_the_pass_alone_in_plain_inductor(fake_world: int, seen: list[Any], place: str) -> None:
    fusion = mkcompile.FusionPass(mkcompile.Options(fuse="always"))
    if place == "options":
        compile_and_run(row_parallel, backend="inductor", options={HOOKS[0]: fusion})
    else:
        with inductor_config.patch({HOOKS[0]: fusion}):
            compile_and_run(row_parallel, backend="inductor")
    assert fused(seen) == ["gemm_all_reduce"]
    assert [[site.operator for site in sites] for sites in fusion.graphs] == [["gemm_all_reduce"]]


def test_reset_is_passed_on(fake_world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    monkeypatch.setattr(backend.mkernel, "reset", lambda: called.append(True))
    compile_and_run(no_collective, backend="mkernel")
    torch._dynamo.reset()
    assert called


def test_unknown_attribute_of_the_package() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'fuse_it'"):
        mkcompile.fuse_it  # noqa: B018


def test_a_joint_pass_of_the_users_goes_before_ours_and_never_takes_none() -> None:
    theirs = CountingPass()
    settings = {backend.JOINT_HOOK: theirs}
    chained = backend.with_joint_pass(settings, Options())[backend.JOINT_HOOK]
    first, last = chained if isinstance(chained, list) else chained._passes
    assert first is theirs and isinstance(last, SaveReduced)
    assert backend.with_joint_pass(settings, Options(fuse="never")) == settings
