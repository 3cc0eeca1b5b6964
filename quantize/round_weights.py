"""Round weights to 8 bits so that their errors cancel on calibration text, before dynamic_int8 or static_int8.

Those round to the nearest, and find nothing left to round. Costs nothing at run time; a repeat takes the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from tx_export.errors import PassError
from tx_export.passes import Context, Coverage, GraphPass, Left, Outcome
from tx_export.quantize._calibration import observe
from tx_export.quantize._smooth_compensation import compensated
from tx_export.quantize._smooth_products import Products, products_of
from tx_export.quantize._smooth_rounding import rounded_columns, rounded_rows
from tx_export.quantize._smooth_trial import Trial, parts, worse

__all__ = ["RoundWeights"]

_WORTH_IT = 0.1  # dB less error of the products
_HELD_BYTES = 1 << 29  # of Hessians at a time; for the rest the text is run again


@dataclass(frozen=True)
class RoundWeights(GraphPass):
    """GPTQ with one step for each column: 2 dB behind smooth on MiniLM, where weights are half of the error."""

    damping: float = 0.01  # of the mean diagonal of the Hessian; more trusts the text less
    only: str = ""  # weights, or modules with all of theirs, separated by commas; empty: all

    budget: ClassVar[str | None] = "sqnr_db=10"  # that of the 8-bit pass behind it

    def __post_init__(self) -> None:
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping is {self.damping}; allowed: above 0, up to 1")

    def call(self, model: ir.Model) -> Outcome:
        if self.context is None:
            raise PassError("weights are rounded by calibration text: run round_weights in a build")
        choosing, judging = parts(self.context, every=5)
        inputs, left = products_of(model.graph, self.only)
        rounded = model.clone()
        gains: list[float] = []
        copies = products_of(rounded.graph, self.only)[0]
        for group in _groups(copies):
            gains += _round(rounded, group, self.damping, choosing, judging)
        whole = worse(model.clone(), rounded.clone(), judging) if max(gains, default=0.0) >= _WORTH_IT else None
        done = 0
        for each, copy, gain in zip(inputs, copies, gains, strict=True):
            reason = whole if gain >= _WORTH_IT else f"doesn't pay: {gain:.1f} dB"
            if reason is None:
                each.replace_weight(copy.weight())
                done += len(each.nodes)
            else:
                left += [Left(name, reason) for name in each.names]
        return Outcome(model, done > 0, Coverage(done, done + len(left), tuple(left)))


def _round(
    model: ir.Model, inputs: Sequence[Products], damping: float, choosing: Context, judging: Context
) -> list[float]:
    """Round those that gain by it, in dB of the error of the products on the other part of the text."""
    values = [each.x for each in inputs]
    hessians = [np.zeros((each.channels, each.channels)) for each in inputs]
    for batch in observe(model, values, choosing):
        for each, hessian in zip(inputs, hessians, strict=True):
            x = rounded_rows(batch[each.x.name or ""])
            hessian += x.T @ x
    weights = [each.weight() for each in inputs]
    rounded = [
        compensated(weight, hessian, damping) if hessian.any() else rounded_columns(weight)
        for weight, hessian in zip(weights, hessians, strict=True)
    ]
    trials = [(Trial(), Trial()) for _ in inputs]
    for batch in observe(model, values, judging):
        for each, weight, new, (nearest, made) in zip(inputs, weights, rounded, trials, strict=True):
            x = batch[each.x.name or ""]
            seen, exact = rounded_rows(x), x @ weight
            nearest.add(seen @ rounded_columns(weight), exact)
            made.add(seen @ new, exact)
    gains = [made.gain_over(nearest) for nearest, made in trials]
    for each, new, gain in zip(inputs, rounded, gains, strict=True):
        if gain >= _WORTH_IT:
            each.replace_weight(new)
    return gains


def _groups(inputs: Sequence[Products]) -> Iterator[list[Products]]:
    """As many at a time as their Hessians may take memory."""
    group: list[Products] = []
    held = 0
    for each in inputs:
        size = 8 * each.channels**2
        if group and held + size > _HELD_BYTES:
            yield group
            group, held = [], 0
        group.append(each)
        held += size
    if group:
        yield group
