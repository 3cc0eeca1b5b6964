"""Shrink the loud channels that products read, before 8 bits: x @ w = (x / s) @ (s w) with s >= 1 for each channel.

Only shrinking, as no channel that is loud in other text may be amplified. After SmoothQuant (Xiao et al. 2022).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tx_export.errors import PassError
from tx_export.passes import Context, Coverage, GraphPass, Left, Outcome
from tx_export.quantize._smooth_products import Products, products_of, weight_at
from tx_export.quantize._smooth_search import STRENGTHS, Choice, scale_of, search
from tx_export.quantize._smooth_text import format_scales, parse_scales
from tx_export.quantize._smooth_trial import parts, worse
from tx_export.quantize._weights import name_of

__all__ = ["Smooth"]

_WORTH_A_NODE, _WORTH_IT = 1.0, 0.1  # dB less error of the products: for a Mul at run time, and for none


@dataclass(frozen=True)
class Smooth(GraphPass):
    """Stands before dynamic_int8 or static_int8; the graph computes what it did, and where it can, at no cost."""

    strength: float | None = None  # 1 shrinks to the median of the channels; None: searched for each product
    only: str = ""  # weights, or modules with all of theirs, separated by commas; empty: all
    scales: str = ""  # NAME:CHANNEL+CHANNEL*QUARTER_OCTAVES/... of each product; empty: found on calibration text

    def __post_init__(self) -> None:
        parse_scales(self.scales)
        if self.strength is not None and not 0 < self.strength <= 1:
            raise ValueError(f"strength is {self.strength}; allowed: above 0, up to 1")

    def call(self, model: ir.Model) -> Outcome:
        inputs, left = products_of(model.graph, self.only)
        chosen, refused = self._given(inputs) if self.scales else self._found(model, inputs)
        for choice in chosen:
            choice.products.divide(scale_of(choice.steps))
        done, left = sum(len(choice.products.nodes) for choice in chosen), [*left, *refused]
        repeat = dataclasses.replace(self, strength=None, scales=_text(chosen))
        coverage = Coverage(done, done + len(left), tuple(left), repeat=(repeat,) if done else ())
        return Outcome(model, done > 0, coverage)

    def _given(self, inputs: Sequence[Products]) -> tuple[list[Choice], list[Left]]:
        """Products that read one value share what divides it where their scales are equal."""
        listed, left = parse_scales(self.scales), []
        equal: dict[tuple[ir.Value, bytes], list[ir.Node]] = {}
        for x, node in ((each.x, node) for each in inputs for node in each.nodes):
            name = name_of(node)
            if name in listed:
                steps = _steps(name, listed[name], len(weight_at(node)[0]))
                equal.setdefault((x, steps.tobytes()), []).append(node)
            else:
                left.append(Left(name, "scales doesn't list it"))
        found = [
            Choice(Products(x, tuple(nodes)), np.frombuffer(steps, np.int64)) for (x, steps), nodes in equal.items()
        ]
        return found, left

    def _found(self, model: ir.Model, inputs: Sequence[Products]) -> tuple[list[Choice], list[Left]]:
        """Where it pays by the error of products, as far as the whole model is no worse for it."""
        if self.context is None:
            raise PassError("scales are found on calibration text: run smooth in a build, or give it scales")
        strengths = STRENGTHS if self.strength is None else (self.strength,)
        choosing, judging = parts(self.context, every=2)
        found = search(model, inputs, strengths, choosing, judging)
        reasons = [_reason(choice) for choice in found]
        chosen = [choice for choice, reason in zip(found, reasons, strict=True) if reason is None]
        if chosen and (reason := self._worse(model, chosen, judging)) is not None:
            chosen, reasons = [], [known or reason for known in reasons]
        left = [(choice, reason) for choice, reason in zip(found, reasons, strict=True) if reason is not None]
        return chosen, [Left(name, reason) for choice, reason in left for name in choice.products.names]

    def _worse(self, model: ir.Model, chosen: Sequence[Choice], context: Context) -> str | None:
        smoothed = model.clone()
        dataclasses.replace(self, scales=_text(chosen))(smoothed)
        return worse(model.clone(), smoothed, context)


def _steps(name: str, listed: Mapping[int, int], channels: int) -> np.ndarray:
    if max(listed) >= channels:
        raise PassError(f"scales lists channel {max(listed)} of {name}, which reads {channels}")
    steps = np.zeros(channels, np.int64)
    steps[list(listed)] = list(listed.values())
    return steps


def _reason(choice: Choice) -> str | None:
    """Why it is left as it is."""
    if choice.gain_db is None:
        return "no loud channel"
    worth = _WORTH_IT if choice.products.folds() else _WORTH_A_NODE
    return None if choice.gain_db >= worth else f"doesn't pay: {choice.gain_db:.1f} dB"


def _text(chosen: Sequence[Choice]) -> str:
    return format_scales({name: choice.steps for choice in chosen for name in choice.products.names})
