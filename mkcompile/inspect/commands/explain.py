"""`explain module:function`: what the backend would make of a model."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mkcompile.errors import OptionError
from mkcompile.plan.topology import PRESETS

# How torch says that there is no process group: `dist` itself, and a mesh that would make one.
_NO_GROUP = ("process group has not been initialized", "environment variable RANK expected", "process group named")
DESCRIPTION = """\
FUNCTION returns (model, args) or (model, args, kwargs). With --world it is called in a fake process group of so many
ranks, so that no machine is needed; a function that makes a mesh needs it. Build the model under torch.device("meta")
and no weights are allocated.

  python -m mkcompile explain mkcompile.inspect.examples:llama --world 8 --topology 8xh200 --set size=70b --layers 80
"""


def add(commands: Any) -> None:
    """Register the command."""
    one = commands.add_parser(
        "explain",
        help="every collective of a model: fused as what, or why not, and what it gains",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument("target", metavar="MODULE:FUNCTION", help="what makes the model and its inputs")
    one.add_argument("--world", type=int, metavar="N", help="plan for N ranks without them (a fake process group)")
    one.add_argument("--topology", metavar="NAME", help="plan for this machine (a preset, such as 8xh200)")
    one.add_argument("--layers", type=int, metavar="N", help="call FUNCTION(layers=1) and (layers=2), extrapolate to N")
    one.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an argument for FUNCTION")
    one.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of torch.compile")
    one.add_argument("--forward-only", action="store_true", help="leave backward out")
    one.add_argument("--html", type=Path, metavar="FILE", help="write the report as one page")
    one.add_argument("--json", action="store_true", help="print JSON instead of tables")
    one.set_defaults(run=run, passes_rest=False)


def run(arguments: argparse.Namespace) -> int:
    """Explain and show."""
    from mkcompile.inspect.explain import Request, explain_layers, explain_request

    function = load(arguments.target)
    options = pairs(arguments.option)
    if arguments.topology:
        options["mkernel.topology"] = arguments.topology
    given = pairs(arguments.set)

    def request_of(layers: int | None) -> Request:
        model, args, kwargs = call(function, given if layers is None else {**given, "layers": layers})
        backward = not arguments.forward_only
        return Request(model=model, args=args, kwargs=kwargs, options=options, backward=backward)

    layers = arguments.layers
    if layers is not None and layers < 1:
        raise OptionError(f"--layers must be at least 1, got {layers}")
    if layers is not None and "layers" in given:
        raise OptionError("--layers and --set layers=... both say how many layers to build")
    with _world(arguments.world, arguments.topology):
        report = explain_request(request_of(None)) if layers is None else explain_layers(request_of, layers)
    if arguments.json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=1) + "\n")
    else:
        report.print()
    if arguments.html:
        Console(stderr=True).print(f"wrote {report.to_html(arguments.html)}")
    return 0


@contextmanager
def _world(size: int | None, topology: str | None) -> Iterator[None]:
    from mkcompile.inspect.offline import fake_world

    if size is not None and size < 1:
        raise OptionError(f"--world must be at least 1, got {size}")
    machine = PRESETS.get(topology or "")
    if size is not None and machine is not None and size > machine.num_gpus:
        raise OptionError(
            f"--world {size}, but {topology} has {machine.num_gpus} GPUs: name one with enough, such as 2x8xh200"
        )
    with nullcontext() if size is None else fake_world(size):
        yield


def load(target: str) -> Callable[..., Any]:
    """`module:function`, imported.

    Raises: OptionError.
    """
    module_name, separator, function_name = target.partition(":")
    if not separator or not module_name or not function_name:
        raise OptionError(f"expected MODULE:FUNCTION, got {target!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module_name), function_name)
    except ImportError as error:
        raise OptionError(f"can't import {module_name!r}: {error}") from error
    except AttributeError as error:
        raise OptionError(f"module {module_name!r} has no function {function_name!r}") from error
    if not callable(found):
        raise OptionError(f"{target} is not a function")
    return found  # type: ignore[no-any-return]


def call(
    function: Callable[..., Any], given: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What the function returns, with an empty dict where it leaves the keywords out.

    Raises: OptionError.
    """
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        takes = ", ".join(inspect.signature(function).parameters) or "nothing"
        raise OptionError(f"{function.__name__}: {error} (it takes {takes}; --set NAME=VALUE gives one)") from error
    if not torch.distributed.is_initialized():
        function = _in_need_of_ranks(function)
    result = function(**given)
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not callable(result[0]):
        raise OptionError("the function must return (model, args) or (model, args, kwargs)")
    model, args = result[:2]
    return model, tuple(args), dict(result[2]) if len(result) == 3 else {}


def _in_need_of_ranks(function: Callable[..., Any]) -> Callable[..., Any]:
    """What torch says of a missing process group, in words of the command."""

    @wraps(function)
    def called(**given: Any) -> Any:
        try:
            return function(**given)
        except (ValueError, RuntimeError) as error:
            if not any(sign in str(error) for sign in _NO_GROUP):
                raise
            raise OptionError(
                f"{function.__name__} needs a process group: --world N makes one of N ranks that talks to nobody "
                f"({str(error).splitlines()[0]})"
            ) from error

    return called


def pairs(texts: list[str]) -> dict[str, Any]:
    """`name=value` texts as a dict; a value that is JSON (a number, true, a list) is read as that.

    Raises: OptionError.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise OptionError(f"expected NAME=VALUE, got {text!r}")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found
