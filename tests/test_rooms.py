"""The rules of the rooms, read from the sources: who imports whom, sizes, settings, literals."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mkcompile"
CSRC = ROOT / "csrc"

# What each room may import of this package, besides itself.
ROOMS = {
    "config": {"errors"},
    "errors": set(),
    "ops": {"config", "errors"},
    "plan": {"config", "errors", "ops"},
    "passes": {"config", "errors", "ops", "plan"},
    "runtime": {"config", "errors", "ops", "plan"},
    "codegen": {"ops", "plan"},
    "backend": {"config", "errors", "ops", "plan", "passes", "runtime", "codegen"},
    "inspect": {"config", "errors", "ops", "plan", "passes", "runtime", "backend"},
    "demo": {"config", "errors", "ops", "plan", "passes", "runtime", "backend", "inspect"},
    "__init__": {"config", "errors", "ops", "runtime", "backend", "inspect"},
    "__main__": {"inspect", "demo", "plan", "errors", "config"},
}
# What lies outside of this package and is closed to a room.
CLOSED = {
    "plan": ("torch.cuda", "torch.fx", "torch._inductor"),
    "passes": ("torch.cuda", "cuda", "torch._inductor.codegen"),
    "ops": ("torch.cuda", "cuda", "torch.fx", "torch._inductor"),
    "runtime": ("torch.fx", "torch._inductor", "torch._dynamo"),
    "config": ("torch",),
    "errors": ("torch",),
}
# What the C++ rooms may include of each other.
INCLUDES = {"abi": {"abi"}, "device": {"abi", "device"}, "host": {"abi", "host"}}

FILE, PYTHON_FUNCTION, HEADER, PARAMETERS = 400, 60, 300, 6
MAX_SETTINGS = 12
# SM counts of GPUs that we know: asked of the device, never constants of what plans or launches. Presets describe GPUs.
BANNED_NUMBERS = {108, 114, 132, 148}
COUNTING_ROOMS = ("ops", "plan", "passes", "runtime", "backend")
DESCRIBES_MACHINES = ("mkcompile/plan/topology.py",)
# Where everything may be caught: what a rank raised is told to the process that started it.
CATCHES_ALL = ("mkcompile/inspect/ranks.py",)
# Written when a kernel is compiled, not a file.
GENERATED = "generated"


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def own_python() -> list[Path]:
    folders = ("mkcompile", "tests", "benchmarks", "tools")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def sources() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh", ".cc", ".cu"))


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(path: Path) -> Iterator[str]:
    """All modules and names that a file imports, absolute; what is imported for type checkers only counts as well."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{short(path)}:{node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def breaches_of_imports(path: Path, room: str) -> list[str]:
    found = []
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "mkcompile" and len(parts) > 1:
            if parts[1] != room and parts[1] not in ROOMS[room] and f"{parts[1]}.py" != path.name and is_room(parts[1]):
                found.append(f"{short(path)} imports {name}")
        elif any(name == closed or name.startswith(closed + ".") for closed in CLOSED.get(room, ())):
            found.append(f"{short(path)} imports {name}")
    return found


def is_room(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


@cache
def exceptions() -> dict[str, str]:
    """`path[:function]` -> justification, from tests/size_exceptions.txt."""
    path = ROOT / "tests" / "size_exceptions.txt"
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    pairs = [line.split(maxsplit=1) for line in lines]
    assert all(len(pair) == 2 for pair in pairs), "each exception needs its reason on the same line"
    return {name: why for name, why in pairs}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def too_large() -> Iterator[str]:
    for path in own_python():
        if len(path.read_text().splitlines()) > FILE:
            yield short(path)
        for function in functions(path):
            assert function.end_lineno is not None
            if function.end_lineno - function.lineno + 1 > PYTHON_FUNCTION:
                yield f"{short(path)}:{function.name}"
    for path in sources():
        if len(path.read_text().splitlines()) > (FILE if path.suffix == ".cc" else HEADER):
            yield short(path)


def wide_functions() -> Iterator[str]:
    """Functions of the package with more parameters than a struct would have; self and keyword bags don't count."""
    for path in package_files():
        for function in functions(path):
            given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            names = [one.arg for one in given if one.arg not in ("self", "cls")]
            if len(names) > PARAMETERS:
                yield f"{short(path)}:{function.name}"


def test_every_file_belongs_to_a_room() -> None:
    assert [short(path) for path in package_files() if room_of(path) not in ROOMS] == []


def test_rooms_import_only_what_they_may() -> None:
    assert [one for path in package_files() for one in breaches_of_imports(path, room_of(path))] == []


def test_a_breach_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = "import torch.cuda.nccl\nfrom mkcompile.passes import fuse\nfrom mkcompile.runtime.wiring import install"
    monkeypatch.setitem(globals(), "tree", lambda path: ast.parse(planted))
    path = PACKAGE / "ops" / "planted.py"
    assert len(breaches_of_imports(path, "ops")) == 3
    assert len(breaches_of_imports(path, "inspect")) == 0


def test_no_files_import_each_other_in_a_circle() -> None:
    """A file imports its packages' heads, too, but those that it is in: they are what a user imports."""
    names = {
        path: short(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in package_files()
    }
    left = {name: imported(path, name, set(names.values())) for path, name in names.items()}
    while free := {name for name, needs in left.items() if needs.isdisjoint(left)}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert sorted(left) == []


def module_of(path: Path) -> str:
    return short(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(path: Path, name: str, modules: set[str]) -> set[str]:
    """The modules of the package that a file imports, with the packages that these are in."""
    parts = [one.split(".") for one in imports(path)]
    prefixes = {".".join(one[:length]) for one in parts for length in range(2, len(one) + 1)}
    return {one for one in prefixes & modules if not f"{name}.".startswith(f"{one}.")}


def test_c_sources_include_only_what_they_may() -> None:
    for path in sources():
        check_includes(path)


def check_includes(path: Path) -> None:
    room = path.relative_to(CSRC).parts[0]
    for name in re.findall(r'#include\s+"([^"]+)"', path.read_text()):
        if GENERATED in Path(name).parts:
            continue
        known = [base for base in (CSRC, path.parent, *CSRC.iterdir()) if (base / name).exists()]
        assert known, f"{short(path)} includes {name}, which is not there"
        target = (known[0] / name).resolve().relative_to(CSRC.resolve()).parts[0]
        assert target in INCLUDES[room], f"{short(path)} includes {name}"
    if room == "device":
        outside = re.findall(r"#include\s+<([^>]+)>", path.read_text())
        assert outside == [], f"{short(path)} includes {outside}"


def test_sizes_are_within_budget_or_justified() -> None:
    assert sorted({*too_large(), *wide_functions()} - set(exceptions())) == []


def test_every_exception_is_still_needed() -> None:
    assert sorted(set(exceptions()) - {*too_large(), *wide_functions()}) == []


def test_only_config_reads_the_environment() -> None:
    readers = {"environ", "getenv", "environb"}
    for path in package_files():
        if path.name == "config.py" and path.parent == PACKAGE:
            continue
        names = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute) and is_os(node.value)}
        assert names.isdisjoint(readers), f"{short(path)} reads the environment"


def is_os(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "os"


def test_settings_are_few() -> None:
    from dataclasses import fields

    from mkcompile.config import Settings

    assert len(fields(Settings)) <= MAX_SETTINGS


def test_c_sources_read_no_environment() -> None:
    assert [short(path) for path in sources() if "getenv" in path.read_text()] == []


def test_no_print_no_bare_except_no_mutable_module_state() -> None:
    for path in package_files():
        for node in ast.walk(tree(path)):
            where = f"{short(path)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("print", "breakpoint"), f"{where} prints"
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else ""
                catches_all = caught in ("", "Exception", "BaseException")
                assert not catches_all or short(path) in CATCHES_ALL, f"{where} catches everything"
            assert not isinstance(node, ast.Global), f"{where} changes a module's state"


def test_no_sizes_of_known_machines_in_the_code() -> None:
    for path in package_files():
        if room_of(path) not in COUNTING_ROOMS or short(path) in DESCRIBES_MACHINES:
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and type(node.value) is int:
                assert node.value not in BANNED_NUMBERS, f"{short(path)}:{node.lineno} has {node.value}"


def test_one_name_for_the_files_of_an_operator() -> None:
    from mkcompile.ops import OPERATOR_MODULES

    for name in OPERATOR_MODULES:
        assert (PACKAGE / "passes" / f"{name}.py").exists(), f"no finder for {name}"
        assert (ROOT / "tests" / "operators" / f"test_{name}.py").exists(), f"no test for {name}"


@pytest.mark.parametrize("tool", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=" ".join)
@pytest.mark.slow
def test_linters_are_content(tool: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *tool], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
