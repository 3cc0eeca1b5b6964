"""One run of the module on symbolic sizes, as torch.export has it: every place where Python wants to know a size.

The sizes lie in their declared ranges, so what holds over the whole range is never asked. What the user's own code
settles narrows a range; what a library asks is answered as the example has it, and forgotten.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
)
from torch.utils._sympy.value_ranges import ValueRanges

from tx_export._lint_frames import Paths, Place, module_paths, place_here, place_of_error
from tx_export._module_adapter import ModuleAdapter
from tx_export._module_inputs import example, sizes_of
from tx_export._slow_path import slow_path
from tx_export.spec import Dim, EagerModel, TensorSpec

__all__ = ["Question", "Trace", "needed_value", "trace", "without_traces"]


@dataclass(frozen=True)
class Question:
    """A size that Python wanted to know: a yes or no that divides the declared range, or the number itself."""

    place: Place
    dims: tuple[str, ...]  # that the answer depends on
    number: bool


@dataclass(frozen=True)
class Trace:
    """What was asked, in order; and what stopped the run, with its place."""

    questions: tuple[Question, ...]
    failure: Exception | None
    place: Place | None


class _AskedSizes(ShapeEnv):
    """Notes who asks. Library code narrows nothing: what it asks would hide the same question of the user."""

    def __init__(self, paths: Paths) -> None:
        super().__init__(specialize_zero_one=False, allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        self.paths = paths
        self.questions: list[Question] = []
        self.sizes: dict[str, Any] = {}  # a symbolic size for each named dimension
        self.names: dict[sympy.Symbol, str] = {}

    def evaluate_expr(
        self,
        orig_expr: sympy.Basic,
        hint: int | bool | float | None = None,
        fx_node: torch.fx.Node | None = None,
        size_oblivious: bool = False,
        fallback_value: bool | None = None,
        *,
        forcing_spec: bool = False,
    ) -> sympy.Basic:
        dims = tuple(sorted({self.names[symbol] for symbol in orig_expr.free_symbols if symbol in self.names}))
        place = place_here(self.paths) if dims else None
        decides = place is None or (place.through == "user" and not isinstance(orig_expr, sympy.Expr))
        known = len(self.guards)
        with nullcontext() if decides else self.suppress_guards():
            answer = super().evaluate_expr(
                orig_expr, hint, fx_node, size_oblivious, fallback_value, forcing_spec=forcing_spec
            )
        number = isinstance(orig_expr, sympy.Expr) or (decides and _equates(orig_expr, answer))
        if place is not None and (number or len(self.guards) > known):
            self.questions.append(Question(place, dims, number))
        return answer


def _equates(asked: sympy.Basic, answer: sympy.Basic) -> bool:
    """Whether a size was said to be a number."""
    return isinstance(asked, sympy.Eq) and bool(answer) and any(side.is_number for side in asked.args)


def trace(model: EagerModel) -> Trace:
    """Run the module once; nothing that it raises comes out, and nothing that it writes stays."""
    module = without_traces(model.module)
    paths = module_paths(module)
    env = _AskedSizes(paths)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    small, _ = sizes_of(model.inputs)
    examples = example(model.inputs, small)
    feeds = [_symbolic(spec, feed, env, mode) for spec, feed in zip(model.inputs, examples, strict=True)]
    try:
        with (
            slow_path(),
            _silent(),
            mode,
            _NonStrictTorchFunctionHandler(),
            _compiling_state_context(),
            torch.no_grad(),
        ):
            module(*feeds)
    except Exception as error:  # a user's module raises anything
        return Trace(tuple(env.questions), error, place_of_error(error, paths))
    return Trace(tuple(env.questions), None, None)


def without_traces(module: nn.Module) -> nn.Module:
    """What may run without leaving anything behind: an adapter undoes what forward writes, else it is a copy."""
    return module if isinstance(module, ModuleAdapter) else copy.deepcopy(module)


def needed_value(error: BaseException | None) -> Literal["branch", "number"] | None:
    """What Python wanted of a tensor's values, which neither symbolic tensors nor graphs have; None: nothing."""
    while error is not None:
        if isinstance(error, GuardOnDataDependentSymNode):
            return "number" if isinstance(error.cond, sympy.Expr) else "branch"
        if isinstance(error, DataDependentOutputException):
            return "number"
        error = error.__cause__
    return None


@contextmanager
def _silent() -> Iterator[None]:
    """Torch logs each question that it can't answer; the answer is the caller's."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(disabled)


def _symbolic(spec: TensorSpec, feed: torch.Tensor, env: _AskedSizes, mode: FakeTensorMode) -> torch.Tensor:
    """The feed without values, its named dimensions unknown within their bounds, and equal where their names are."""
    named = [isinstance(dim, Dim) and feed.shape[axis] > 1 for axis, dim in enumerate(spec.dims)]
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DUCK if each else DimDynamic.STATIC for each in named],
        constraint_sizes=[
            _range(dim) if each and isinstance(dim, Dim) else None for each, dim in zip(named, spec.dims, strict=True)
        ],
    )
    fake = mode.from_tensor(feed, symbolic_context=context, source=ConstantSource(spec.name))
    for axis, dim in enumerate(spec.dims):
        if named[axis] and isinstance(dim, Dim):
            size: Any = fake.shape[axis]
            torch._check(size == env.sizes.setdefault(dim.name, size))  # type: ignore[no-untyped-call]
            env.names[size.node.expr] = dim.name
    return fake


def _range(dim: Dim) -> StrictMinMaxConstraint:
    return StrictMinMaxConstraint(vr=ValueRanges(1, dim.bound or (1 << 31) - 1), warn_only=False)
