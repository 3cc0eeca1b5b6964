"""The precision of every product, chosen by measurement: fp32, 8-bit integers, or blocks of 8 or 4 bits.

Two measurements of each product in each form, error and time, and a knapsack between them. The choice stands in the
recorded pipeline as the passes that make it, so a repeat measures nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from tx_export.errors import PassError
from tx_export.metrics import Budget
from tx_export.passes import Context, Coverage, GraphPass, Left, Outcome
from tx_export.quantize._auto_candidates import (
    Candidate,
    Product,
    candidates_of,
    forms_of,
    measure_noise,
    measure_times,
)
from tx_export.quantize._auto_choice import Decision, Limits, choose, quicker
from tx_export.quantize._auto_noise import noise_of
from tx_export.quantize._auto_products import apply, passes_of, products_of, weight_bytes
from tx_export.quantize._auto_report import chart, table
from tx_export.quantize._auto_search import DOUBT
from tx_export.timing import Shape

__all__ = ["Auto"]

_log = logging.getLogger("tx_export")

Feeds = Mapping[str, np.ndarray]

_POSITIONS = 1024  # of text for each single product
_WHOLE_POSITIONS = 1 << 15  # of text for a whole model
_NODE_BYTES = 300  # a node and its names in a file
_DEFAULT = "sqnr_db=20"


@dataclass(frozen=True)
class Auto(GraphPass):
    """The fastest choice within the budget; or, under a limit on time or size, the one with the least error."""

    tokens: str = "128"  # lengths at which time counts, separated by commas, each as much as the others
    batch: int = 1  # rows at which time counts
    latency: float = 0.0  # at most this share of the time that the products take in fp32; 0: no limit
    size_mb: float = 0.0  # the graph takes at most so many megabytes (10^6 bytes); 0: no limit
    chart: str = ""  # a PNG of the frontier is written there

    chooses_by_labels: ClassVar[bool] = True

    @property
    def budget(self) -> str:  # type: ignore[override]
        return "none" if self.latency or self.size_mb else _DEFAULT

    def __post_init__(self) -> None:
        lengths = [text.strip() for text in self.tokens.split(",")]
        if not all(text.isdecimal() and int(text) > 0 for text in lengths) or self.batch < 1:
            raise ValueError(f"tokens is {self.tokens!r}, batch {self.batch}; both take positive numbers, say 16,128")
        if self.latency < 0 or self.size_mb < 0:
            raise ValueError(f"latency is {self.latency}, size_mb {self.size_mb}; a limit is above 0, and 0 is none")

    def call(self, model: ir.Model) -> Outcome:
        context, budget = _usable(self.context), self._asked()
        products = products_of(model)
        learned, judged = _parted(context)
        candidates, refused = self._candidates(model, products, dataclasses.replace(context, feeds=learned))
        if all(len(forms) == 1 for forms in candidates):
            left = tuple(Left(each.name, refused.get(each.name, "no form is faster here")) for each in products)
            return Outcome(model, False, Coverage(0, len(products), left), subject="quantized")
        measure_noise(model, products, candidates, context, _some(judged, _POSITIONS))
        whole = _Whole(model, products, context, _some(judged, _WHOLE_POSITIONS), "accuracy" in budget)
        decision = choose(candidates, self._limits(model, products, budget), whole)
        told = f"the frontier of time and error, the chosen point marked\n{table(decision.rows)}"
        _log.warning("auto: %s", told)
        if self.chart:
            chart(decision.rows, Path(self.chart))
        coverage = _made(model, products, candidates, refused, decision)
        coverage = dataclasses.replace(coverage, measured=f"\n## Precision of each product\n\n```\n{told}\n```\n")
        return Outcome(model, coverage.done > 0, coverage, subject="quantized")

    def _asked(self) -> dict[str, float]:
        """What the caller asks for, else the default of the pass; no margin is taken off."""
        default = {key: limit for key, limit in dataclasses.asdict(Budget.parse(self.budget)).items() if limit}
        return dict(self.context.budget) if self.context is not None and self.context.budget else default

    def _candidates(
        self, model: ir.Model, products: Sequence[Product], context: Context
    ) -> tuple[list[list[Candidate]], dict[str, str]]:
        """Of each product those that may be chosen, with times; and why a product has but one."""
        forms = forms_of(model, context) if products else []
        tables = [form for form in forms if self.size_mb or form.name == "int8"]
        found = [candidates_of(model, each, tables if each.is_table else forms) for each in products]
        candidates = [forms for forms, _ in found]
        refused = {
            each.name: why[0] for each, (forms, why) in zip(products, found, strict=True) if why and len(forms) == 1
        }
        shapes = [Shape(self.batch, int(length)) for length in self.tokens.split(",")]
        if self.size_mb and not self.latency:  # no decision depends on time
            shapes = []
        rows = str(model.graph.inputs[0].shape[0]) if model.graph.inputs and model.graph.inputs[0].shape else ""
        measure_times(products, candidates, shapes, context, rows)
        if not self.size_mb:
            candidates = [quicker(forms) for forms in candidates]
        return candidates, refused

    def _limits(self, model: ir.Model, products: Sequence[Product], budget: Mapping[str, float]) -> Limits:
        others = weight_bytes(model) - sum(each.nbytes for each in products) + _NODE_BYTES * len(list(model.graph))
        return Limits(budget, self.latency, self.size_mb * 1e6, others)


class _Whole:
    """What the whole model has with a choice, with the keys of a budget."""

    def __init__(
        self,
        model: ir.Model,
        products: Sequence[Product],
        context: Context,
        feeds: Sequence[Feeds],
        needs_labels: bool,
    ) -> None:
        self.model, self.products, self.context, self.feeds = model, products, context, feeds
        self.needs_labels = needs_labels

    def __call__(self, choice: Sequence[Candidate]) -> Mapping[str, float]:
        assert self.context.drift is not None
        copy = self.model.clone()
        apply(copy, _passes(self.products, choice))
        runner = self.context.open(copy)
        found = dict(self.context.drift(runner, self.feeds))
        found[DOUBT] = _doubt_db([noise_of(self.context.drift(runner, [feeds])) for feeds in self.feeds])
        if self.needs_labels and self.context.accuracy is not None:
            found["accuracy"] = self.context.accuracy(runner)
        return found


def _doubt_db(noises: Sequence[float]) -> float:
    """How much more noise other text may have: two standard errors of the difference of two means over batches.

    The text that judges a build is half of what is measured on here, so the variance is that of this mean times three.
    """
    mean = float(np.mean(noises))
    if len(noises) < 2 or not mean:
        return 0.0
    error = float(np.std(noises, ddof=1)) / math.sqrt(len(noises))
    return 10 * math.log10(1 + 2 * math.sqrt(3) * error / mean)


def _passes(products: Sequence[Product], choice: Sequence[Candidate]) -> tuple[GraphPass, ...]:
    return passes_of([(product.name, each.form) for product, each in zip(products, choice, strict=True)])


def _usable(context: Context | None) -> Context:
    if context is None or context.drift is None or not (context.feeds or context.probes):
        raise PassError("auto: it measures the error of the model, which takes inputs and the eager model; it has none")
    if "accuracy" in context.budget and context.accuracy is None:
        raise PassError("auto: a budget in accuracy takes labelled text; give it with --eval")
    return context


def _parted(context: Context) -> tuple[Sequence[Feeds], Sequence[Feeds]]:
    """Text that forms are calibrated on, and text, or where there is none any inputs, that they are measured on."""
    if len(context.feeds) > 1:
        return context.feeds[::2], context.feeds[1::2]
    return context.feeds, context.feeds or context.probes


def _some(feeds: Sequence[Feeds], positions: int) -> list[Feeds]:
    """Batches from the shortest to the longest, so many that they have about as many positions."""
    total = sum(max(array.size for array in batch.values()) for batch in feeds)
    step = max(1, math.ceil(total / positions))
    return list(feeds[step // 2 :: step])


def _made(
    model: ir.Model,
    products: Sequence[Product],
    candidates: Sequence[Sequence[Candidate]],
    refused: Mapping[str, str],
    decision: Decision,
) -> Coverage:
    """Apply a decision, and tell what it leaves."""
    repeat, stored = apply(model, _passes(products, decision.chosen))
    whole = decision.factor * sum(each.noise for each in decision.chosen)
    left = []
    for product, forms, each in zip(products, candidates, decision.chosen, strict=True):
        if each.form.passes:
            continue
        if len(forms) == 1:
            left.append(Left(product.name, refused.get(product.name, "no form is faster here")))
            continue
        least = min(forms[1:], key=lambda form: form.noise)
        lost = 10 * math.log10(1 + decision.factor * least.noise / whole) if whole else math.inf
        left.append(Left(product.name, f"stays fp32: {least.form.name} would cost {lost:.2f} dB"))
    return Coverage(len(products) - len(left), len(products), tuple(left), repeat=repeat, stored=stored)
