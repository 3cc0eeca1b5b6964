"""Scales found on text: only loud channels shrink, only where it pays, and a repeat needs no text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn

from tx_export.artifact import open_graph
from tx_export.errors import PassError, PluginError
from tx_export.passes import Context, Outcome, Pipeline
from tx_export.providers.cpu import Cpu
from tx_export.quantize._smooth_trial import parts
from tx_export.quantize.dynamic_int8 import DynamicInt8
from tx_export.quantize.smooth import Smooth

from .graphs import Array, activation_scale, column_scale, graph, normal, operators, quantize, rounding_bound, run

_K, _N, _LOUD = 64, 48, 5
_BODY = "h = Neg (x) y = MatMul (h, w) o = Sigmoid (h)"  # h has another reader, so a Mul divides it


def loud(rows: int = 40, seed: int = 20, factor: float = 64) -> Array:
    x = normal(rows, _K, seed=seed)
    x[:, _LOUD] *= factor
    return x


def quiet_row(factor: float = 64) -> Array:
    """A weight that reads a loud channel as little as it is loud, so that all channels count alike."""
    weight = normal(_K, _N)
    weight[_LOUD] /= factor
    return weight


def product(weight: Array | None = None, body: str = _BODY) -> ir.Model:
    weights = {"w": quiet_row() if weight is None else weight}
    return graph(f"float[n, {_K}] x", f"float[n, {_N}] y, float[n, {_K}] o", weights, body)


def context(batches: Sequence[Array], **others: Any) -> Context:
    return Context(
        module=nn.Identity(),
        feeds=[{"x": batch} for batch in batches],
        open=lambda model: open_graph(model, Cpu().session(), threads=1),
        **others,
    )


def text(count: int = 4, **options: Any) -> list[Array]:
    return [loud(seed=seed, **options) for seed in range(30, 30 + count)]


def smooth(model: ir.Model, given: Context | None, **options: Any) -> Outcome:
    outcome = Smooth(**options, context=given)(model)
    assert isinstance(outcome, Outcome)
    return outcome


def decibels(exact: Array, found: Array) -> float:
    return 10 * math.log10(np.square(exact).sum() / np.square(found - exact).sum())


def test_a_planted_loud_channel_costs_no_precision_any_more() -> None:
    x, ratios = loud(seed=1), {}
    exact = -x.astype(np.float64) @ quiet_row()
    for name, found in (("plain", None), ("smooth", context(text()))):
        model = product()
        if found is not None:
            assert smooth(model, found).coverage.done == 1
        quantize(model)
        ratios[name] = decibels(exact, run(model, {"x": x})["y"])
    # Shrinking by s makes the steps of x up to 64 times finer, 36 dB, and those of the weight coarser only where
    # s w exceeds the column's largest, which the planted row never does before s = 64: half of that must be left.
    assert ratios["smooth"] >= ratios["plain"] + 18


@pytest.mark.parametrize("seed", range(5))
def test_scales_never_amplify_and_the_graph_means_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spread = (10 ** rng.uniform(-2, 2, _K)).astype(np.float32)
    batches = [normal(20, _K, seed=50 + number) * spread for number in range(4)]
    weight = normal(_K, _N, seed=seed)
    model, x = product(weight), batches[0]
    expected = run(model, {"x": x})["y"]
    smooth(model, context(batches))
    stored = model.graph.initializers["w"].const_value
    assert stored is not None
    ratio = stored.numpy() / weight
    # Rounding of a scale and of its product with a weight: 6e-8 each.
    assert ratio.min() >= 1 - 2e-7 and ratio.max() > 2
    assert np.abs(run(model, {"x": x})["y"] - expected).max() <= 1e-6 * (np.abs(x) @ np.abs(weight)).max()


def test_a_channel_that_gets_loud_only_in_later_text_is_no_worse_than_without() -> None:
    later = loud(seed=1)
    later[::7, 9] *= 100  # far louder than what was planted, and quiet in the text
    weight = quiet_row()
    exact, model = -later.astype(np.float64) @ weight, product()
    smooth(model, context(text()))
    stored, copy = model.graph.initializers["w"].const_value, product()
    assert stored is not None
    scale = (stored.numpy() / weight)[:, 0]
    assert math.isclose(scale[9], 1, rel_tol=1e-6)
    # The step of the tensor is what dynamic int8 takes, and can't be coarser: no channel is larger than it was.
    assert activation_scale(-later / scale) <= activation_scale(-later) * (1 + 1e-6)
    quantize(model)
    found = run(model, {"x": later})["y"]
    bound = rounding_bound(-later / scale, stored.numpy(), column_scale(stored.numpy()))
    assert (np.abs(found - exact) <= bound).all()
    quantize(copy)
    # The planted row of the weight now counts as much as each of the other 63, 0.07 dB; the rest is other roundings.
    assert decibels(exact, found) >= decibels(exact, run(copy, {"x": later})["y"]) - 1


def test_a_product_without_loud_channels_is_left_with_the_reason() -> None:
    flat = [np.sign(normal(20, _K, seed=seed)) for seed in range(4)]
    model = product()
    outcome = smooth(model, context(flat))
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, 1)
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [("w", "no loud channel")]
    assert operators(model) == ["Neg", "MatMul", "Sigmoid"]


def test_a_product_whose_error_is_in_its_weight_is_left_with_the_gain() -> None:
    outcome = smooth(product(normal(_K, _N)), context(text(factor=1.7)))
    assert not outcome.modified
    (left,) = outcome.coverage.left
    assert left.reason.startswith("doesn't pay: 0.")


def test_what_costs_no_node_may_gain_less() -> None:
    body = "h = LayerNormalization (x, gamma) y = MatMul (h, w) o = Sigmoid (x)"
    gamma = np.ones(_K, np.float32)
    gamma[_LOUD] = 1.7
    weights = {"w": normal(_K, _N), "gamma": gamma}
    model = graph(f"float[n, {_K}] x", f"float[n, {_N}] y, float[n, {_K}] o", weights, body)
    before = operators(model)
    outcome = smooth(model, context([normal(40, _K, seed=seed) for seed in range(4)]))
    assert outcome.coverage.done == 1 and operators(model) == before


def test_a_repeat_needs_no_text_and_gives_the_same_graph() -> None:
    first, second = product(), product()
    outcome = smooth(first, context(text()))
    (repeat,) = outcome.coverage.repeat
    assert isinstance(repeat, Smooth) and repeat.scales.startswith("w:")
    pipeline = Pipeline.parse(str(repeat), lambda name: Smooth)
    assert str(pipeline) == str(repeat)
    again = smooth(second, None, scales=pipeline.passes[0].scales)  # type: ignore[attr-defined]
    assert ir.to_proto(first).SerializeToString() == ir.to_proto(second).SerializeToString()
    assert again.coverage.repeat == outcome.coverage.repeat


def test_every_choice_is_made_on_part_of_the_text_and_judged_on_another() -> None:
    seen: list[list[float]] = []

    def drift(runner: Callable[..., Any], feeds: Sequence[Mapping[str, Array]]) -> dict[str, float]:
        seen.append([float(each["x"][0, 0]) for each in feeds])
        return {"sqnr_db": 20.0, "cosine": 0.99}

    batches = text(6)
    assert smooth(product(), context(batches, drift=drift)).coverage.done == 1
    assert seen == [[float(batch[0, 0]) for batch in batches[1::2]]] * 2


def test_text_to_judge_on_is_no_text_to_choose_by() -> None:
    batches = text(40)
    choosing, judging = ([id(each["x"]) for each in part.feeds] for part in parts(context(batches), every=2))
    assert len(judging) <= 16 and not set(choosing) & set(judging)
    assert sorted([*choosing, *judging]) == sorted(map(id, batches))
    alone = parts(context(batches[:1]), every=2)
    assert [len(part.feeds) for part in alone] == [1, 1]


@pytest.mark.parametrize("key", ["sqnr_db", "cosine"])
def test_nothing_is_scaled_where_the_whole_in_8_bits_gets_worse(key: str) -> None:
    answers = iter([{"sqnr_db": 20.0, "cosine": 0.99}, {"sqnr_db": 20.0, "cosine": 0.99, key: 0.9}])
    model = product()
    outcome = smooth(model, context(text(), drift=lambda runner, feeds: next(answers)))
    assert not outcome.modified and operators(model) == ["Neg", "MatMul", "Sigmoid"]
    (left,) = outcome.coverage.left
    assert left.reason.startswith(f"the whole in 8 bits gets worse: {key} 0.9 instead of ")


def test_a_strength_that_is_asked_for_is_the_one_that_is_used() -> None:
    def most(**options: Any) -> float:
        model = product()
        smooth(model, context(text()), **options)
        stored = model.graph.initializers["w"].const_value
        assert stored is not None
        return float((stored.numpy() / quiet_row())[_LOUD].mean())

    # The channel is 64 times as loud as the others: 2^6, within what the largest of 160 draws varies.
    assert 2**2.5 <= most(strength=0.5) <= 2**3.5 and 2**5.25 <= most(strength=1.0) <= 2**6.75


def test_it_stands_in_a_pipeline_before_the_8_bit_pass() -> None:
    model = product()
    pipeline = Pipeline.parse("smooth dynamic_int8", lambda name: Smooth if name == "smooth" else DynamicInt8)
    done = pipeline.run_graph(model, context(text()), ["smooth", "dynamic_int8"], lambda item, outcome: None)
    again = product()
    done.run_graph(again, context([]), ["smooth", "dynamic_int8"], lambda item, outcome: None)
    assert ir.to_proto(again).SerializeToString() == ir.to_proto(model).SerializeToString()


def test_without_text_it_says_what_to_do() -> None:
    with pytest.raises(PassError, match=r"^calibration needs text, and the model takes arrays only; "):
        smooth(product(), context([]))
    with pytest.raises(PassError, match=r"^scales are found on calibration text: run smooth in a build, or give it "):
        smooth(product(), None)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    batches = text()
    batches[2][3, 4] = value
    with pytest.raises(PassError, match=f"^calibration: 1 of {40 * _K} numbers of h are NaN or infinite"):
        smooth(product(), context(batches))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("scales=w", "scales has 'w'; expected NAME:CHANNEL"),
        ("scales=w:3*0", "scales has 'w:3"),
        ("scales=w:3*-4", "scales has 'w:3"),
        ("scales=w:3*4 w:5*4", "scales has 'w:5"),
        ("strength=0", "strength is 0.0; allowed: above 0, up to 1"),
        ("strength=1.5", "strength is 1.5; allowed: above 0, up to 1"),
    ],
)
def test_options_that_cannot_be_read_are_refused(options: str, message: str) -> None:
    with pytest.raises(PluginError, match=f"^pass smooth: {message}"):
        Smooth.parse(options)


def test_a_channel_that_a_weight_does_not_have_is_refused() -> None:
    with pytest.raises(PassError, match=r"^scales lists channel 64 of w, which reads 64$"):
        smooth(product(), None, scales="w:64*4")


def test_a_product_that_scales_do_not_list_is_left() -> None:
    outcome = smooth(product(), None, scales="v:3*4")
    assert not outcome.modified
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [("w", "scales doesn't list it")]
