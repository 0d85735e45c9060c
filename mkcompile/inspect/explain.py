"""`mkcompile.explain`: what the backend would make of a model, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mkcompile.errors import OptionError
from mkcompile.inspect import boundaries, breaks, capture, offline, timeline, unbuilt
from mkcompile.inspect.capture import Recorder
from mkcompile.inspect.collect import Rows, rows_of
from mkcompile.inspect.findings import NO_COLLECTIVE, Extrapolation
from mkcompile.inspect.predict import Planner, planner_for
from mkcompile.inspect.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One model to explain: the callable, its arguments, and what `torch.compile` would be given."""

    model: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: dict[str, Any] | None = None
    mode: str | None = None
    backward: bool = True


def explain(
    model: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, mode: str | None = None, **kwargs: Any
) -> Report:
    """Every collective of the model's forward and backward: fused as what, or why not; predicted and measured times.

    `options` and `mode` are those of `torch.compile`, by default those that the model was compiled with by this
    backend; all else goes to the model. Nothing is computed and no code is generated; each rank may call it alone,
    unless the model has graph breaks with collectives between its graphs. A model on the meta device is planned with no
    weights allocated (see `mkcompile.inspect.offline.fake_world`).

    Raises: OptionError.
    """
    return explain_request(Request(model=model, args=args, kwargs=kwargs, options=options, mode=mode))


def explain_request(request: Request) -> Report:
    """As `explain`, with everything in one struct."""
    started = time.perf_counter()
    if request.options is None and request.mode is None:
        options, mode = capture.compiled_with(request.model)
        request = replace(request, options=options, mode=mode)
    record = capture.recorder(request.options, request.mode)
    planner = planner_for(record.options)
    _run(record, request)
    report = _report(record, request, planner)
    return replace(report, capture_s=time.perf_counter() - started)


def explain_layers(request_of: Callable[[int], Request], layers: int) -> Report:
    """The report on two layers of a model, extrapolated to `layers`: what the second one adds, times the rest.

    Raises: OptionError where the second layer adds nothing.
    """
    one, two = explain_request(request_of(1)), explain_request(request_of(2))
    if _num_nodes(one) == _num_nodes(two):
        raise OptionError("one layer and two layers give the same graphs: does the function build as many as told?")
    layer = two.totals.plus(one.totals, -1)
    scale = Extrapolation(layers=layers, compiled=2, layer=layer, total=two.totals.plus(layer, layers - 2))
    return replace(two, capture_s=one.capture_s + two.capture_s, extrapolation=scale)


def _num_nodes(report: Report) -> int:
    return sum(len(pair.before.nodes) for pair in report.graphs)


def _run(record: Recorder, request: Request) -> None:
    if not offline.on_meta(request.model, request.args, request.kwargs):
        capture.compile_and_run(record, request.model, request.args, request.kwargs, backward=request.backward)
        return
    with offline.as_fake_cpu(request.model, request.args, request.kwargs) as (args, kwargs):
        capture.compile_and_run(record, request.model, args, kwargs, backward=request.backward)


def _report(record: Recorder, request: Request, planner: Planner) -> Report:
    rows = rows_of(record.graphs, planner)
    found = breaks.collect(record.endings)
    nothing = not rows.collectives and not any(one.at_collective for one in found)
    return Report(
        model=_name(request.model),
        torch_version=torch.__version__,
        topology=planner.machine,
        options=", ".join(f"{name}={value}" for name, value in (request.options or {}).items()),
        collectives=rows.collectives,
        graphs=rows.graphs,
        breaks=tuple(found),
        timelines=timeline.predict(rows.graphs, rows.collectives, planner.topology),
        notes=(NO_COLLECTIVE,) if nothing else _notes_on(rows, planner),
    )


def _notes_on(rows: Rows, planner: Planner) -> tuple[str, ...]:
    return (*boundaries.notes_on(rows.collectives, rows.graphs), *unbuilt.notes_on(rows.collectives, planner))


def _name(model: Callable[..., Any]) -> str:
    return type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", repr(model))
