"""`python -m mkcompile`: what it prints and its exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mkcompile.inspect import cli
from mkcompile.inspect.commands import delegated

MODELS = "tests.inspect.models:"
BY_HAND = MODELS + "by_hand"
ALWAYS = ("--option", "mkernel.fuse=always")


def test_explain_prints_json_and_writes_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert cli.main(["explain", BY_HAND, "--world", "4", "--json", "--html", str(page), *ALWAYS]) == 0
    out = capsys.readouterr().out
    values = json.loads(out)
    assert values["collectives"][0]["operator"] == "gemm_all_reduce"
    assert page.stat().st_size > 10_000


def test_explain_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", BY_HAND, "--world", "4", "--forward-only", "--option", "mkernel.fuse=never"]) == 0
    out = capsys.readouterr().out
    assert "mkernel.fuse is 'never'" in out and "0 of 1 collectives fused" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "nowhere"], "expected MODULE:FUNCTION"),
        (["explain", "no_such_module:f"], "can't import 'no_such_module'"),
        (["explain", "tests.inspect.models:no_such"], "has no function 'no_such'"),
        (["explain", "tests.inspect.models:BF16"], "is not a function"),
        (["explain", "tests.inspect.models:no_model"], "must return (model, args)"),
        (["explain", BY_HAND, "--world", "0"], "--world must be at least 1"),
        (["explain", BY_HAND, "--world", "4", "--topology", "9xh200"], "unknown topology '9xh200'"),
        (["explain", BY_HAND, "--set", "size"], "expected NAME=VALUE"),
        (["explain", MODELS + "on_a_mesh"], "on_a_mesh needs a process group: --world N makes one"),
        (["explain", MODELS + "on_a_mesh", "--set", "widht=4"], "argument 'widht' (it takes width; --set NAME=VALUE"),
        (["tune", MODELS + "on_a_mesh", "--set", "widht=4"], "argument 'widht' (it takes width; --set NAME=VALUE"),
        (["explain", BY_HAND, "--layers", "0"], "--layers must be at least 1, got 0"),
        (["explain", MODELS + "layers_of_its_own", "--world", "4", "--layers", "3"], "give the same graphs"),
        (["explain", BY_HAND, "--world", "16", "--topology", "8xh200"], "--world 16, but 8xh200 has 8 GPUs"),
        (["explain", BY_HAND, "--option", "mkernel.fuse=perhaps"], "mkernel.fuse must be one of"),
        (["explain", BY_HAND, "--frobnicate"], "unknown arguments: --frobnicate"),
    ],
)
def test_misuse_is_status_two_and_says_what_is_wrong(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == cli.MISUSED
    assert says in " ".join(capsys.readouterr().err.split())


def test_values_are_json_where_they_can_be() -> None:
    from mkcompile.inspect.commands.explain import pairs

    assert pairs(["a=1", "b=true", "c=70b", "d=x=y"]) == {"a": 1, "b": True, "c": "70b", "d": "x=y"}


@pytest.mark.parametrize("one", delegated.COMMANDS, ids=lambda one: one.name)
def test_a_missing_command_says_what_it_needs(
    one: delegated.Delegated, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(delegated, "main_of", lambda module: None)
    assert cli.main([one.name, "--its-own", "arguments"]) == delegated.MISSING
    assert one.needs.split()[0] in capsys.readouterr().err


def test_a_delegated_command_gets_its_arguments_and_gives_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(arguments: list[str]) -> int:
        seen.append(arguments)
        return 7

    monkeypatch.setattr(delegated, "main_of", lambda module: run)
    assert cli.main(["bench", "ops", "--json", "-n", "3"]) == 7
    assert seen == [["ops", "--json", "-n", "3"]]


def test_only_modules_with_a_command_count() -> None:
    assert delegated.main_of("mkcompile.no_such_module") is None
    assert delegated.main_of("no_such_package.module") is None
    assert delegated.main_of("mkcompile.errors") is None
    assert delegated.main_of("mkcompile.demo") is not None


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "mkcompile", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("mkcompile ")


def test_a_wrong_setting_is_one_line_of_any_command() -> None:
    environment = {**os.environ, "MKCOMPILE_FOO": "1"}
    command = [sys.executable, "-m", "mkcompile", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == cli.MISUSED
    assert done.stderr.startswith("OptionError: unknown setting MKCOMPILE_FOO") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_405b_over_sixteen_nodes_is_planned_in_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    arguments = ["explain", "mkcompile.inspect.examples:llama", "--world", "128", "--topology", "16x8xh200"]
    arguments += ["--set", "size=405b", "--set", "tensor_parallel=8", "--layers", "126", "--json"]
    assert cli.main(arguments) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["capture_s"] < 60
    assert values["extrapolation"]["total"]["operators"] > 126 * 4
    assert {one["world_size"] for one in values["collectives"]} == {8}
