"""Which of the user's modules differs first in a graph that failed, found by comparing values on the way.

Walk back from the wrong outputs to the values that agree with eager: what lies between holds the fault. Of the tensors
that eager's modules take and give there, the first that the graph has in another form names the module.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import nn

from tx_export import plugins
from tx_export._alike import agreement, alikeness, difference
from tx_export._eager_trace import Moment, Trace, trace
from tx_export._grid import Case
from tx_export.artifact import open_graph
from tx_export.metrics import Budget, Difference
from tx_export.spec import EagerModel

__all__ = ["blame"]

Array = NDArray[Any]

_log = logging.getLogger("tx_export")

_NEAREST_DB = 1.0  # among tensors that agree with a value, those that are as near as the nearest


def blame(model: EagerModel, module: nn.Module, graph: ir.Model, case: Case, allowed: Budget | None) -> str | None:
    """A clause that names the first module whose output differs in a case; None where that can't be told.

    `allowed` is the budget of a lossy step; None means the bound of fp32.
    """
    if model.family == "onnx":  # no modules
        return None
    try:
        return _told(trace(model, module, case), graph, case, allowed)
    except Exception as error:  # of the user's module, ONNX Runtime or want of memory: the failure itself is still told
        _log.debug("blame: %s: %s", type(error).__name__, error)
        return None


@dataclass(frozen=True)
class _Fault:
    moment: Moment
    behind: Moment | None  # the last tensor that agrees
    gone: Sequence[Moment]  # tensors between the two that the graph doesn't have
    difference: Difference | None


def _told(eager: Trace, graph: ir.Model, case: Case, allowed: Budget | None) -> str | None:
    if (spoilt := eager.spoilt()) is not None:
        where = "" if spoilt.returned else "the forward of "
        return f"eager itself is not finite there, first in {where}{eager.label(spoilt.owner, spoilt.call)}"
    search = _Search(eager, graph, case, allowed)
    fault = search.fault()
    if fault is None:
        return None
    gone = [moment.origin.owner for moment in fault.gone]
    blamed = eager.common([fault.moment.origin.owner, *gone])
    call = fault.moment.origin.call if blamed == fault.moment.origin.owner else None
    how = "differs" if all(name in search.arrays for name in eager.outputs) else "is not computed"
    clause = f"the first module that {how} is {eager.label(blamed, call)}"
    if not gone and not (fault.moment.origin.returned and eager.is_leaf(blamed)):
        clause += f", in its own forward{_behind(eager, fault.behind, blamed)}"
    return clause + _amount(fault.difference, allowed)


def _behind(eager: Trace, moment: Moment | None, blamed: str) -> str:
    if moment is None or not moment.origin.returned or moment.origin.owner == blamed:
        return ""
    return f" behind {eager.label(moment.origin.owner, moment.origin.call)}"


def _amount(found: Difference | None, allowed: Budget | None) -> str:
    if found is None:
        return ""
    if found.non_finite[1]:
        return f": {found.non_finite[1]} values are not finite there"
    if allowed is None:
        return f": off by {found.max_abs:.4g} there"
    return "".join(f": {breach} there" for breach in allowed.breaches(found)[:1])


class _Search:
    """Values of the graph beside the moments of eager's run."""

    def __init__(self, eager: Trace, graph: ir.Model, case: Case, allowed: Budget | None) -> None:
        self.eager, self.graph, self.allowed = eager, graph.graph, allowed
        self.arrays = _values(graph, case.feeds)
        self.border: dict[str, int] = {}  # values that agree, and the first moment of those that they agree with
        self.known: set[int] = set()  # moments that the graph has, unharmed
        for value in (*self.graph.inputs, *(output for node in self.graph for output in node.outputs)):
            if value.name in self.arrays:
                self._match(value, self.arrays[value.name])

    def fault(self) -> _Fault | None:
        """None where all outputs agree."""
        wrong = [value for value in self.graph.outputs if not self._is_right(value.name or "")]
        if not wrong:
            return None
        suspects, border = self._behind(wrong)
        if self.allowed is not None:  # behind a sum with what came before, an error looks smaller than it is
            suspects = [value for node in self.graph for value in node.outputs]
        for value in suspects:
            if (index := self._form_of(value)) is not None:
                last = self._last_form(value, index)
                return self._first(self._behind([last])[1], index, last)
        return self._first(border, len(self.eager.moments), None)

    def _first(self, border: set[int], last: int, value: ir.Value | None) -> _Fault | None:
        """What differs first behind the border: the moment `last`, of which `value` is a form, at the latest."""
        moments = self.eager.moments
        start = 0 if self.allowed is not None else min(border, default=-1) + 1
        unknown = [index for index in range(start, last) if index not in self.known | border]
        readers = ((index, self._readers(moments[index])) for index in unknown)
        if found := next(((index, nodes) for index, nodes in readers if nodes), None):
            last, value = found[0], self._product(moments[found[0]], found[1])
        given = self._given(last)
        if given and all(index in unknown for index in given):
            last, value = given[0], None
        nearest = max((index for index in border if index < last), default=-1)
        between = [index for index in unknown if nearest < index < last]
        gone = [index for index in between if moments[index].origin.returned]  # a mask handed on has many forms
        if last == len(moments):
            if not between:
                return None
            last, gone = (*gone, *between)[0], []
        amount = None if value is None else difference(moments[last], self.arrays[value.name or ""])
        behind = moments[nearest] if nearest >= 0 else None
        return _Fault(moments[last], behind, [moments[index] for index in gone], amount)

    def _given(self, index: int) -> tuple[int, ...]:
        """What an innermost module was given that returned a moment."""
        origin = self.eager.moments[index].origin if index < len(self.eager.moments) else None
        return origin.given if origin is not None and self.eager.is_leaf(origin.owner) else ()

    def _match(self, value: ir.Value, array: Array) -> None:
        near = [(agreement(moment, array, self.allowed), index) for index, moment in self._of_size(array.size)]
        best = max((level for level, _ in near if level is not None), default=None)
        if best is not None:
            agreeing = [index for level, index in near if level is not None and level >= best - _NEAREST_DB]
            self.known.update(agreeing)
            self.border[value.name or ""] = min(agreeing)
            return
        for index, moment in self._of_size(array.size):
            if moment.origin.bias is not None and self._is_unbiased(value, array, moment):
                self.border[value.name or ""] = index

    def _is_unbiased(self, value: ir.Value, array: Array, moment: Moment) -> bool:
        """Whether a value lacks only the bias of a product, which the operator behind it adds."""
        assert moment.origin.bias is not None
        added = any(use.node.op_type == "Add" for use in value.uses())
        if added or moment.origin.bias.shape != moment.array.shape[-1:]:
            return False
        unbiased = dataclasses.replace(moment, array=moment.array - moment.origin.bias)
        return agreement(unbiased, array, self.allowed) is not None

    def _of_size(self, size: int) -> list[tuple[int, Moment]]:
        return [(index, moment) for index, moment in enumerate(self.eager.moments) if moment.array.size == size]

    def _is_right(self, name: str) -> bool:
        expected, array = self.eager.outputs[name], self.arrays.get(name)
        if array is None or array.shape != expected.array.shape:
            return False
        return agreement(expected, array, self.allowed) is not None

    def _behind(self, wrong: Sequence[ir.Value]) -> tuple[list[ir.Value], set[int]]:
        """What leads to these values without passing one that agrees, in order; and the moments at that border."""
        found, border, waiting = set(wrong), set(), list(wrong)
        while waiting:
            node = waiting.pop().producer()
            for value in (value for value in (node.inputs if node is not None else ()) if value is not None):
                if value.name in self.border:
                    border.add(self.border[value.name])
                elif value not in found:
                    found.add(value)
                    waiting.append(value)
        order = [value for node in self.graph for value in node.outputs if value in found]
        return order, border

    def _last_form(self, value: ir.Value, index: int) -> ir.Value:
        """Of values that follow on each other and are forms of one moment; a product without its bias is one."""
        after = (output for use in value.uses() for output in use.node.outputs)
        following = next((output for output in after if self._form_of(output) == index), None)
        return value if following is None else self._last_form(following, index)

    def _form_of(self, value: ir.Value) -> int | None:
        """The moment that a value is another form of, if the graph has it in no other."""
        array = self.arrays.get(value.name or "")
        if array is None or value.name in self.border:
            return None
        levels = [(alikeness(moment, array), index) for index, moment in self._of_size(array.size)]
        level, index = max(levels, default=(0.0, -1))
        return index if level > 0 and index not in self.known else None

    def _readers(self, moment: Moment) -> list[ir.Node]:
        """The nodes that read weights of the innermost module that returned this, if the graph still holds them."""
        if not moment.origin.returned or not self.eager.is_leaf(moment.origin.owner):
            return []
        sizes = self.eager.weights[moment.origin.owner]
        held = (v for name, v in self.graph.initializers.items() if f".{moment.origin.owner}." in f".{name}")
        same = [value for value in held if value.const_value is not None and value.const_value.size in sizes]
        return [use.node for value in same for use in value.uses()]

    def _product(self, moment: Moment, readers: Sequence[ir.Node]) -> ir.Value | None:
        """The last value of a moment's size that these nodes give."""
        order = [value for node in self.graph if node in readers for value in node.outputs]
        sizes = {name: array.size for name, array in self.arrays.items()}
        return next((v for v in reversed(order) if sizes.get(v.name or "") == moment.array.size), None)


def _values(graph: ir.Model, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Every float value of a run, and the outputs; where it fails, those before the first that can't be computed."""
    names = [value.name for node in graph.graph for value in node.outputs if value.name]
    found: dict[str, Array] = {}
    low, tried, high = 0, len(names), len(names)
    while low < high:
        try:
            found, low = _run(graph, names[:tried], feeds), tried
        except Exception:  # of ONNX Runtime
            high = tried - 1
        tried = (low + high + 1) // 2
    outputs = [value.name for value in graph.graph.outputs]
    arrays = {
        name: array.astype(np.float32) if name in outputs else array for name, array in {**feeds, **found}.items()
    }
    return {name: array for name, array in arrays.items() if array.dtype.kind == "f" and array.size}


def _run(graph: ir.Model, names: Sequence[str], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """As a build verifies it: with exact 8-bit products, and no fusion across values that are asked for."""
    copy = graph.clone()
    values = {value.name: value for node in copy.graph for value in node.outputs}
    copy.graph.outputs[:] = [values[name] for name in names]
    RemoveUnusedNodesPass()(copy)
    outputs = open_graph(copy, plugins.find("provider", "cpu")().session())(feeds)
    return {name: array for name, array in outputs.items() if isinstance(array, np.ndarray)}
