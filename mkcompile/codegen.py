"""How Inductor's generated code calls our operators: straight into Python, below torch's dispatcher. And which of their
results it must not give to others.

Inductor asks a table for the code of an operator that it has no kernel of its own for. Ours is a call of an
`ops.registry.Site`, of which the generated module has one for each call. Calls that did not come from our pass, and
wrappers other than the Python one (C++, FX), keep the ordinary form: their cache keys may not hold our version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch._inductor import ir
from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
from torch._inductor.codegen.wrapper import ExternKernelAllocLine, PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.virtualized import V

from mkcompile.ops.registry import call_types
from mkcompile.plan import key

# Not a process group: buffers of this name are never those that torch's own communication asks for.
_GROUP = "mkcompile"
_IMPORT = "from mkcompile.ops.registry import Site as MkcompileSite"


def install() -> None:
    """From now on, for every graph that this process compiles."""
    for operator in call_types():
        CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.mkcompile.{operator}.default"] = CustomCodegen(python=_generate)


def _generate(node: ir.FallbackKernel, writeline: Callable[[str], None]) -> None:
    wrapper = V.graph.wrapper_code
    args = [*node.codegen_args(), *node.codegen_kwargs()]
    if V.graph.fx_wrapper or not _plan_key(node):
        wrapper.writeline(ExternKernelAllocLine(wrapper, node))  # type: ignore[no-untyped-call]
        return
    operator, name = str(node.op_overload).split(".")[1], node.get_name()
    site = f"mkcompile_{operator}_{name}"
    root = _root(wrapper)
    root.add_import_once(_IMPORT)
    root.add_import_once(f"{site} = MkcompileSite({operator!r}, fixed={_is_fixed(node)})")
    writeline(f"{name} = {site}({', '.join(args)})")
    if key.STAYS in key.facts_of(_plan_key(node)):
        _keep_apart(node)


def _keep_apart(node: ir.FallbackKernel) -> None:
    """Peers write into the result, in memory of which there is little: Inductor frees it when it is dead and puts
    nothing else there, neither in place nor later. What it would put there could leave the graph, and live as long as
    the user likes, on one rank longer than on another.
    """
    # one buffer for the call and its result in torch 2.14, two before
    results = [node] if isinstance(node.layout, ir.FixedLayout) else node.outputs
    assert results
    for result in results:
        assert isinstance(result.layout, ir.FixedLayout)
        result.layout = ir.CommBufferLayout(result.layout, ir.CommBufferType.SYMM_MEM, _GROUP)
        V.graph.never_reuse_buffers.add(result.get_name())


def _plan_key(node: ir.FallbackKernel) -> str:
    """The last argument; empty for calls by hand."""
    args, kwargs = node.unflatten_args(node.inputs, node.constant_args)
    return "" if kwargs else str(args[-1])


def _root(wrapper: PythonWrapperCodegen) -> PythonWrapperCodegen:
    """The wrapper that writes the module's head."""
    while isinstance(wrapper, SubgraphPythonWrapperCodegen):
        wrapper = wrapper.parent_wrapper
    return wrapper


def _is_fixed(node: ir.FallbackKernel) -> bool:
    """All sizes and strides are known now."""
    inputs: Iterable[Any] = node.inputs
    return all(_are_numbers([*one.get_size(), *one.get_stride()]) for one in inputs)


def _are_numbers(sizes: Iterable[Any]) -> bool:
    return all(isinstance(size, (int, sympy.Integer)) for size in sizes)
