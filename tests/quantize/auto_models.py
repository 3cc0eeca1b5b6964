"""A graph of four products and a table with a context around it, and times that are told, not measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from torch import nn

from tx_export.artifact import open_graph
from tx_export.metrics import Meter
from tx_export.passes import Context, Outcome
from tx_export.providers.cpu import Cpu
from tx_export.quantize import _auto_times
from tx_export.quantize.auto import Auto

from .graphs import graph, normal

Array = NDArray[Any]
Feeds = Mapping[str, Array]

WIDTH = 64
PRODUCTS = ("first", "loud", "wide", "last")
# Milliseconds of a product in each form; a product of the graph is 1.0 in fp32.
QUICK = {"fp32": 1.0, "int8": 0.5, "smooth int8": 0.55, "static int8": 0.5, "8 bit blocks": 0.8, "4 bit blocks": 0.7}


def network() -> ir.Model:
    """Embedding, then four products; what `loud` reads has one channel that is 300 times larger than the rest.

    The row of `loud` that meets this channel is as much smaller, so 8 bits for the tensor leave nothing of the others.
    """
    spread, loud = np.ones(WIDTH, np.float32), normal(WIDTH, WIDTH, seed=2) / 8
    spread[5], loud[5] = 300.0, loud[5] / 300
    weights = {
        "table": normal(100, WIDTH),
        "first": normal(WIDTH, WIDTH, seed=1) / 8,
        "spread": spread,
        "small": np.full(1, 0.001, np.float32),  # s has a second reader, so that no scale is folded into it
        "loud": loud.astype(np.float32),
        "wide": normal(WIDTH, 2 * WIDTH, seed=3) / 8,
        "last": normal(2 * WIDTH, WIDTH, seed=4) / 11,
    }
    body = (
        "e = Gather (table, ids) a = MatMul (e, first) t = Tanh (a) s = Mul (t, spread) b = MatMul (s, loud) "
        "k = Mul (s, small) f = Add (b, k) r = Add (f, e) c = MatMul (r, wide) u = Tanh (c) y = MatMul (u, last)"
    )
    model = graph("int64[batch, tokens] ids", f"float[batch, tokens, {WIDTH}] y", weights, body)
    for name, width in {
        "e": 64,
        "a": 64,
        "t": 64,
        "s": 64,
        "b": 64,
        "k": 64,
        "f": 64,
        "r": 64,
        "c": 128,
        "u": 128,
    }.items():
        value = next(each for node in model.graph for each in node.outputs if each.name == name)
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(["batch", "tokens", width])
    return model


def texts(count: int, seed: int = 0) -> list[dict[str, Array]]:
    random = np.random.default_rng(seed)
    return [{"ids": random.integers(0, 100, size=(4, length))} for length in random.integers(3, 9, size=count)]


def opened(model: ir.Model) -> Callable[[Feeds], dict[str, Array]]:
    return open_graph(model, Cpu().session(), threads=1)


class Drift:
    """From what the graph computed before anything was done to it."""

    def __init__(self, model: ir.Model) -> None:
        self.exact = opened(model.clone())

    def __call__(self, runner: Callable[[Feeds], Mapping[str, Array]], feeds: Sequence[Feeds]) -> dict[str, float]:
        meter = Meter(lambda rows: rows.argmax(axis=-1))
        for each in feeds:
            for name, expected in self.exact(each).items():
                meter.add(expected, runner(each)[name])
        found = meter.result()
        assert found.cosine is not None and found.agreement is not None
        return {
            "max_abs": found.max_abs,
            "sqnr_db": found.sqnr_db,
            "cosine": found.cosine,
            "agreement": found.agreement,
        }


def context(model: ir.Model, budget: Mapping[str, float] | None = None, **others: Any) -> Context:
    return Context(module=nn.Identity(), feeds=texts(8), open=opened, budget=budget or {}, drift=Drift(model), **others)


def told(monkeypatch: pytest.MonkeyPatch, ms: Mapping[str, float], others: Mapping[str, Mapping[str, float]]) -> None:
    """`ms` by form for each weight, in place of what `others` have by its name."""

    def times(forms: Mapping[str, ir.Model], shapes: Sequence[Any], *_: object) -> dict[str, list[float]]:
        weight = next(iter(forms["fp32"].graph.initializers))
        table = {**ms, **others.get(weight, {})}
        return {form: [table[form]] * len(shapes) for form in forms}

    monkeypatch.setattr(_auto_times, "times", times)


def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(*_: object) -> dict[str, list[float]]:
        raise AssertionError("something was timed")

    monkeypatch.setattr(_auto_times, "times", times)


def run_auto(model: ir.Model, given: Context, **options: Any) -> Outcome:
    outcome = Auto(**options, context=given)(model)
    assert isinstance(outcome, Outcome)
    return outcome


def form_of(outcome: Outcome) -> dict[str, str]:
    """By weight, the passes that it is named in."""
    found: dict[str, list[str]] = {}
    for item in outcome.coverage.repeat:
        for name in item.only.split(","):  # type: ignore[attr-defined]
            found.setdefault(name, []).append(item.name() + str(getattr(item, "bits", "")))
    return {name: " ".join(passes) for name, passes in found.items()}


def decibels(model: ir.Model, changed: ir.Model, feeds: Sequence[Feeds]) -> float:
    found = Drift(model)(opened(changed), feeds)["sqnr_db"]
    assert not math.isnan(found)
    return found


def serialized(model: ir.Model) -> bytes:
    found: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return found
