"""The precision of every product is the quickest that the budget allows, and the choice is repeated without measuring.

The reference is the graph itself before the pass, in ONNX Runtime. Times are told to the pass, so none is measured.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tx_export import plugins
from tx_export.errors import BudgetError, PassError, PluginError
from tx_export.passes import Coverage, Pipeline
from tx_export.quantize.auto import Auto
from tx_export.testing import matmul_model

from .auto_models import (
    PRODUCTS,
    QUICK,
    Drift,
    context,
    decibels,
    form_of,
    network,
    opened,
    run_auto,
    serialized,
    texts,
    told,
    untimed,
)
from .graphs import normal, operators


def test_a_product_that_8_bits_ruin_stays_in_fp32_and_the_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, QUICK | {"8 bit blocks": 2.0, "4 bit blocks": 2.0, "smooth int8": 2.0, "static int8": 2.0}, {})
    model = network()
    outcome = run_auto(model, context(model, {"sqnr_db": 25.0}))
    forms = form_of(outcome)
    assert forms == dict.fromkeys(("first", "wide", "last", "table"), "dynamic_int8")
    assert (outcome.coverage.done, outcome.coverage.of) == (4, 5)
    (left,) = outcome.coverage.left
    assert left.name == "loud" and left.reason.startswith("stays fp32: int8 would cost ")
    # With it, at least half of the whole budget is gone: that is what makes it the sensitive one.
    assert float(left.reason.split()[-2]) > 3


def test_without_a_budget_that_binds_every_product_has_its_quickest_form(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_last = {"last": {"int8": 0.9, "smooth int8": 0.9, "static int8": 0.9, "4 bit blocks": 0.2}}
    told(monkeypatch, QUICK, slow_last)
    model = network()
    forms = form_of(run_auto(model, context(model, {"sqnr_db": 0.0})))
    assert forms["last"] == "blockwise4"
    assert {forms[name] for name in ("first", "wide")} <= {"dynamic_int8", "static_int8"}


@pytest.mark.parametrize("budget", [0.0, 20.0, 30.0])
def test_a_form_that_is_slower_than_fp32_is_never_chosen(monkeypatch: pytest.MonkeyPatch, budget: float) -> None:
    told(monkeypatch, QUICK, {"wide": dict.fromkeys(QUICK, 1.01) | {"fp32": 1.0}})
    model = network()
    outcome = run_auto(model, context(model, {"sqnr_db": budget}))
    assert "wide" not in form_of(outcome)
    assert {left.name: left.reason for left in outcome.coverage.left}["wide"] == "no form is faster here"


@pytest.mark.parametrize("budget", [{"sqnr_db": 25.0}, {"sqnr_db": 35.0}, {"cosine": 0.999}, {"max_abs": 0.2}])
def test_the_budget_holds_on_text_that_was_not_seen(monkeypatch: pytest.MonkeyPatch, budget: dict[str, float]) -> None:
    told(monkeypatch, QUICK, {})
    model = network()
    changed = model.clone()
    assert run_auto(changed, context(model, budget)).modified
    found = Drift(model)(opened(changed), texts(8, seed=77))
    for key, limit in budget.items():
        assert found[key] <= limit if key == "max_abs" else found[key] >= limit


def test_a_stricter_budget_takes_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, QUICK, {})
    model, counted = network(), []
    for budget in (15.0, 30.0, 40.0):
        outcome = run_auto(model.clone(), context(model, {"sqnr_db": budget}))
        counted.append(sum(form.endswith("int8") for form in form_of(outcome).values()))
    assert counted == sorted(counted, reverse=True) and counted[0] > counted[-1]


def test_a_repeat_gives_the_same_bytes_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, QUICK, {"last": {"8 bit blocks": 0.1}})
    model = network()
    first, second = model.clone(), model.clone()
    outcome = run_auto(first, context(model, {"sqnr_db": 25.0}))
    untimed(monkeypatch)
    text = str(Pipeline(outcome.coverage.repeat))
    repeat = Pipeline.parse(text, lambda name: plugins.find("pass", name))
    assert len(repeat.passes) >= 2 and "auto" not in text
    bare = dataclasses.replace(context(model), feeds=(), drift=None)
    repeat.run_graph(second, bare, frozenset(), lambda item, outcome: None)
    assert serialized(first) == serialized(second)
    assert operators(first) != operators(model)


def test_the_error_of_a_single_product_is_that_of_the_graph_with_it_alone_lowered() -> None:
    from tx_export.quantize._auto_candidates import candidates_of, forms_of
    from tx_export.quantize._auto_noise import Noises
    from tx_export.quantize._auto_products import apply, passes_of, products_of

    model, feeds = network(), texts(4)
    given = context(model)
    products = products_of(model)
    form = forms_of(model, given)[0]
    graphs = [(each, {form.name: candidates_of(model, each, [form])[0][1].graphs}) for each in products]
    measured = list(Noises(model, products, given, feeds).measured(graphs))
    assert [each.name for each in products] == [*PRODUCTS, "table"]
    for product, noise in zip(products, measured, strict=True):
        whole = model.clone()
        apply(whole, passes_of([(product.name, form)]))
        expected = 10 ** (-decibels(model, whole, feeds) / 10)
        # Equal but for the order of sums in float32, which moves a value over a rounding edge now and then.
        assert noise[form.name] == pytest.approx(expected, rel=0.05)


def test_a_budget_out_of_reach_names_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, QUICK, {})
    model = network()
    with pytest.raises(BudgetError, match=r"auto: no choice has sqnr_db=90 .* the best has sqnr_db=\d\d"):
        run_auto(model, context(model, {"sqnr_db": 90.0}))


def test_a_budget_in_accuracy_is_met_on_labelled_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, QUICK, {})
    model, labelled = network(), texts(6, seed=5)
    exact = opened(model.clone())
    labels = [exact(each)["y"].argmax(axis=-1) for each in labelled]

    def accuracy(runner: object) -> float:
        assert callable(runner)
        right = [(runner(each)["y"].argmax(axis=-1) == label) for each, label in zip(labelled, labels, strict=True)]
        return float(np.concatenate([each.ravel() for each in right]).mean())

    assert Auto.chooses_by_labels
    strict, free = model.clone(), model.clone()
    run_auto(strict, context(model, {"accuracy": 0.97}, accuracy=accuracy))
    run_auto(free, context(model, {"accuracy": 0.0}, accuracy=accuracy))
    assert accuracy(opened(strict)) >= 0.97 > accuracy(opened(free))
    with pytest.raises(PassError, match="auto: a budget in accuracy takes labelled text; give it with --eval"):
        run_auto(model, context(model, {"accuracy": 0.9}))


def test_under_a_limit_on_time_the_error_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, QUICK | {"8 bit blocks": 2.0, "4 bit blocks": 2.0, "smooth int8": 2.0, "static int8": 2.0}, {})
    model = network()
    outcome = run_auto(model.clone(), context(model), latency=0.88)
    # One of four products in half of its time makes 0.875; the least noisy one alone is lowered.
    noise = {}
    for name in PRODUCTS:
        single = model.clone()
        plugins.find("pass", "dynamic_int8")(only=name)(single)
        noise[name] = -decibels(model, single, texts(8))
    assert [name for name in form_of(outcome) if name != "table"] == [min(noise, key=lambda name: noise[name])]
    with pytest.raises(BudgetError, match=r"latency=0.4 is out of reach; the fastest choice takes 0.500"):
        run_auto(model, context(model), latency=0.4)


def test_under_a_limit_on_size_nothing_is_timed_and_the_file_is_smaller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    untimed(monkeypatch)
    model = network()
    for limit in (0.06, 0.04):
        changed = model.clone()
        run_auto(changed, context(model), size_mb=limit, chart=str(tmp_path / "frontier.png"))
        assert len(serialized(changed)) <= limit * 1e6 < len(serialized(model))
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BudgetError, match=r"size_mb=0.01 is out of reach; the smallest choice takes 0.0\d MB"):
        run_auto(model, context(model), size_mb=0.01)


def test_limits_on_size_and_error_hold_together(monkeypatch: pytest.MonkeyPatch) -> None:
    untimed(monkeypatch)
    model = network()
    with pytest.raises(BudgetError, match=r"auto: no choice has sqnr_db=60 .* the best has sqnr_db="):
        run_auto(model, context(model, {"sqnr_db": 60.0}), size_mb=0.05)


def test_one_product_alone_is_lowered_where_the_budget_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, QUICK, {})
    model = matmul_model(normal(64, 64))
    given = dataclasses.replace(context(model, {"sqnr_db": 20.0}), feeds=[{"x": normal(9, 64, seed=s)} for s in (1, 2)])
    outcome = run_auto(model, given)
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (True, 1, 1)


def test_a_graph_without_products_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    untimed(monkeypatch)
    lowered = matmul_model(normal(64, 64))
    plugins.find("pass", "dynamic_int8")()(lowered)  # no product in float is left
    outcome = run_auto(lowered, context(network()))
    assert not outcome.modified and outcome.coverage == Coverage(0, 0)


def test_where_every_form_is_slower_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, dict.fromkeys(QUICK, 2.0) | {"fp32": 1.0}, {})
    model = matmul_model(normal(64, 64))
    given = dataclasses.replace(context(model), feeds=[{"x": normal(9, 64, seed=s)} for s in (1, 2)])
    before = serialized(model)
    outcome = run_auto(model, given)
    assert not outcome.modified and serialized(model) == before
    assert [left.reason for left in outcome.coverage.left] == ["no form is faster here"]


def test_the_frontier_is_told_with_the_chosen_point_marked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told(monkeypatch, QUICK, {})
    model = network()
    with caplog.at_level("WARNING", logger="tx_export"):
        run_auto(model, context(model, {"sqnr_db": 25.0}))
    (text,) = [record.getMessage() for record in caplog.records if "frontier" in record.getMessage()]
    rows = text.splitlines()
    assert rows[1].split() == ["time", "SQNR", "dB", "MB", "forms"]
    assert [row for row in rows if row.startswith("->")] and 4 < len(rows) < 40


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(PluginError, match="both take positive numbers"):
        Auto.parse("tokens=16,,x")
    with pytest.raises(PluginError, match="a limit is above 0, and 0 is none"):
        Auto.parse("latency=-1")
    with pytest.raises(PassError, match="auto: it measures the error of the model"):
        run_auto(network(), dataclasses.replace(context(network()), drift=None))
