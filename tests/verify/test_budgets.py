"""Drift, invariance, accuracy and `compare`. Stand-ins are changed copies of the eager module."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tx_export.errors import BudgetError, LoadError, PluginError
from tx_export.metrics import Budget
from tx_export.spec import EagerModel
from tx_export.testing import eager_model, tiny_classifier, tiny_embedder
from tx_export.verify import Judge, Runner, Step, check_accuracy, compare, eager_runner, read_rows, text_feeds

from .lines import LINES

Array = NDArray[Any]


@pytest.fixture(scope="module")
def classifier() -> EagerModel:
    return tiny_classifier()


def spoil(model: EagerModel, value: float) -> None:
    head: Any = model.module.get_submodule("head")
    with torch.no_grad():
        head.bias[0] = value


def noisy(model: EagerModel, decibels: float) -> Runner:
    """Eager with every output scaled so that the noise is exactly that far below the signal."""
    eager, factor = eager_runner(model), 1 + 10 ** (-decibels / 20)
    return lambda feeds: {name: (array * factor).astype(np.float32) for name, array in eager(feeds).items()}


def test_drift_is_measured_in_decibels_and_held_to_the_budget(classifier: EagerModel) -> None:
    record = Judge(classifier, LINES).check_lossy("dynamic_int8", noisy(classifier, 20), Budget(sqnr_db=19.9))
    # float32 rounds an output by at most 6e-8 of it: 20 log10(1 + 6e-8 / 0.1) is below 1e-5 dB.
    assert record["outputs"]["logits"]["sqnr_db"] == pytest.approx(20, abs=1e-5)
    assert (record["kind"], record["budget"]) == ("drift", "sqnr_db=19.9")
    with pytest.raises(
        BudgetError, match=r"dynamic_int8: output 'logits': sqnr_db 20 is less than 20.1, worst in case .* text at"
    ):
        Judge(classifier, LINES).check_lossy("dynamic_int8", noisy(classifier, 20), Budget(sqnr_db=20.1))


def test_a_budget_of_the_user_replaces_that_of_the_pass(classifier: EagerModel) -> None:
    loose, strict = Budget(sqnr_db=60), Budget(sqnr_db=10)
    Judge(classifier, LINES, override=strict).check_lossy("float16", noisy(classifier, 20), loose)
    with pytest.raises(BudgetError, match=r"less than 60"):
        Judge(classifier, LINES, override=loose).check_lossy("dynamic_int8", noisy(classifier, 20), strict)


def test_a_later_pass_may_keep_what_an_earlier_one_was_allowed_to_lose(classifier: EagerModel) -> None:
    judge = Judge(classifier, LINES)
    judge.check_lossy("dynamic_int8", noisy(classifier, 20), Budget(sqnr_db=10))
    judge.check_lossy("float16", noisy(classifier, 20), Budget(sqnr_db=40))
    with pytest.raises(BudgetError, match=r"float16: .* less than 10"):
        judge.check_lossy("float16", noisy(classifier, 5), Budget(sqnr_db=40))


def test_a_lossy_step_is_hunted_for_non_finite_values_on_the_grid(classifier: EagerModel) -> None:
    eager = eager_runner(classifier)

    def overflowing(feeds: Mapping[str, Array]) -> dict[str, Array]:
        bad = feeds["input_ids"].shape == (5, 17)
        return {name: array + np.float32(np.inf if bad else 0) for name, array in eager(feeds).items()}

    with pytest.raises(
        BudgetError, match=r"float16: .* \(eager 0, here 50\), the first in case 5x17 full mask at \[0, 0\]: inf"
    ):
        Judge(classifier, LINES).check_lossy("float16", overflowing, Budget())


def per_tensor_int8(model: EagerModel) -> Runner:
    """Activations in 8 bits with one scale for the whole batch, as dynamic int8 has it."""
    module = copy.deepcopy(model.module)
    words: Any = module.get_submodule("encoder.embedding")
    with torch.no_grad():
        words.weight[0] *= 8  # of the padding: as loud as it may be, and masked

    def quantize(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scale = inputs[0].abs().max() / 127
        return ((inputs[0] / scale).round() * scale,)

    for name in ("encoder.layers.0.attention.value", "encoder.layers.1.feed_forward.down"):
        module.get_submodule(name).register_forward_pre_hook(quantize)
    return eager_runner(model, module)


def test_b110_b111_what_depends_on_mates_and_padding_is_reported_and_can_be_bounded(classifier: EagerModel) -> None:
    runner = per_tensor_int8(classifier)
    record = Judge(classifier, LINES).check_lossy("dynamic_int8", runner, Budget(sqnr_db=10))
    # fp32 itself changes by a few 1e-7; one scale of 8 bits moves an activation of about 1 by up to 1 / 254.
    assert 1e-5 < record["invariance"]["batch"] < 1
    assert 1e-6 < record["invariance"]["padding"] < 1
    with pytest.raises(BudgetError, match=r"dynamic_int8: invariance_db .* is less than 90 for a row when it"):
        Judge(classifier, LINES).check_lossy("dynamic_int8", runner, Budget(invariance_db=90))


class _Centred(nn.Module):
    """Subtracts the mean over the batch: an answer that depends on its mates."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embedding(input_ids).sum(dim=1)
        return x - x.mean(dim=0)


def test_a_module_that_keeps_invariance_must_still_keep_it_in_the_graph(classifier: EagerModel) -> None:
    users = eager_model(classifier.module, classifier.inputs, classifier.outputs)
    eager = eager_runner(users)

    def centred(feeds: Mapping[str, Array]) -> dict[str, Array]:
        return {name: array - array.mean(axis=0) for name, array in eager(feeds).items()}

    failures = Judge(users).judge(Step("export", centred)).failures
    assert any("the answer for a row changes by" in failure and "mates" in failure for failure in failures)


def test_invariance_is_promised_by_our_families_and_by_modules_that_keep_it() -> None:
    inputs, outputs = ["input_ids:int64[batch,tokens<=24]{0..9}"], ["pooled:float32[batch,4]"]
    users = eager_model(_Centred(), inputs, outputs)
    ours = eager_model(users.module, inputs, outputs, family="embedder")
    record = Judge(users).check_exact("export", eager_runner(users))
    assert record["invariance"]["padding"] is None  # without a mask there is no padding
    assert record["invariance"]["batch"] > 0.1
    with pytest.raises(BudgetError, match=r"export: the answer for a row changes by .* when it has mates in its batch"):
        Judge(ours).check_exact("export", eager_runner(ours))


def test_compare_names_the_first_step_outside_its_budget(classifier: EagerModel) -> None:
    unscaled = copy.deepcopy(classifier.module)
    attention: Any = unscaled.get_submodule("encoder.layers.0.attention")
    attention.scale = 1.0  # instead of 1 / sqrt(head_dim)
    good, bad = eager_runner(classifier), eager_runner(classifier, unscaled)
    steps = [
        Step("export", good),
        Step("pack_qkv", bad),
        Step("fuse_gelu", bad),
        Step("dynamic_int8", bad, Budget(sqnr_db=200)),
    ]
    found = compare(classifier, steps, LINES)
    assert found.failure is not None
    assert found.failure.startswith("pack_qkv: output 'logits' is off by")
    assert found.to_json()["verdict"] == "fail"


def test_compare_prints_the_json_of_the_contract(classifier: EagerModel) -> None:
    found = compare(classifier, [Step("artifact", eager_runner(classifier))], LINES)
    report = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (found.failure, report["verdict"]) == (None, "pass")
    assert set(report) == {"verdict", "outputs", "invariance", "cases"}
    assert set(report["outputs"]["logits"]) == {"max_abs", "sqnr_db", "cosine", "agreement", "non_finite"}
    assert set(report["invariance"]) == {"padding", "batch"}
    # fp32 in another order: far below the bound of fidelity.
    assert report["invariance"]["padding"] <= 1e-4
    assert report["invariance"]["batch"] <= 1e-4
    assert {"batch": 5, "tokens": 17, "mask": "holed", "max_abs": 0.0, "non_finite": 0} in report["cases"]


def test_b259_compare_fails_and_counts_non_finite_values_of_both_sides(classifier: EagerModel) -> None:
    model = tiny_classifier()
    spoil(model, torch.nan)
    both = compare(model, [Step("artifact", eager_runner(model))], LINES).to_json()
    assert both["verdict"] == "fail"
    one = compare(classifier, [Step("artifact", eager_runner(model))], LINES).to_json()
    assert one["verdict"] == "fail"
    assert both["outputs"]["logits"]["non_finite"] == 2 * one["outputs"]["logits"]["non_finite"] > 0


def test_compare_of_an_artifact_that_fails_to_run_fails(classifier: EagerModel) -> None:
    def broken(feeds: Mapping[str, Array]) -> dict[str, Array]:
        raise RuntimeError("no kernel")

    found = compare(classifier, [Step("artifact", broken)], LINES)
    assert found.failure == "artifact: fails in case 1x1 full mask: no kernel"
    assert found.to_json() == {
        "verdict": "fail",
        "outputs": {},
        "invariance": {"padding": None, "batch": None},
        "cases": [],
    }


def test_a_budget_that_can_not_be_measured_is_refused(classifier: EagerModel) -> None:
    with pytest.raises(PluginError, match=r"agreement needs logits; the outputs are embedding"):
        Judge(tiny_embedder(), LINES, override=Budget(agreement=0.9))
    with pytest.raises(PluginError, match=r"accuracy needs labelled text \(--eval FILE\)"):
        Judge(classifier, LINES, override=Budget(accuracy=0.9))


def test_accuracy_counts_right_rows_in_their_own_order() -> None:
    classifier = tiny_classifier(seed=5)  # finds both labels in these lines
    assert classifier.text is not None
    eager, labels = eager_runner(classifier), classifier.text.labels
    # Reference: every line alone, by its own largest logit; the rows are then labelled so that one of ten is wrong.
    own = [labels[int(eager(text_feeds(classifier, [line])[0])["logits"].argmax())] for line in LINES]
    assert set(own) == set(labels)
    wrong = [labels[1 - labels.index(own[0])], *own[1:]]
    flipped: Runner = lambda feeds: {"logits": -eager(feeds)["logits"]}  # noqa: E731
    found = check_accuracy(classifier, flipped, list(zip(wrong, LINES, strict=True)))
    assert (found.eager, found.artifact, found.agreement, found.rows) == (0.9, 0.1, 0.0, 10)
    rows = list(zip(own, LINES, strict=True))
    with pytest.raises(BudgetError, match=r"accuracy 0 is less than 0.5; eager has 1"):
        Judge(classifier, LINES, Budget(accuracy=0.5), rows).check_lossy("dynamic_int8", flipped, Budget())


def test_rows_of_labelled_text_are_read_or_refused_with_their_line(tmp_path: Path, classifier: EagerModel) -> None:
    path = tmp_path / "eval.tsv"
    path.write_text("positive\ta nice film\n\nnegative\tbad, with a\ttab\n", encoding="utf-8")
    assert read_rows(path) == [("positive", "a nice film"), ("negative", "bad, with a\ttab")]
    path.write_text("positive\tfine\nno label here\n", encoding="utf-8")
    with pytest.raises(LoadError, match=r"eval.tsv, line 2: expected label<TAB>text, not 'no label here'"):
        read_rows(path)
    with pytest.raises(LoadError, match=r"unknown label meh; known: negative, positive"):
        check_accuracy(classifier, eager_runner(classifier), [("meh", "a film")])
    with pytest.raises(LoadError, match=r"needs a text classifier with labels; the task is sentence-embedding"):
        check_accuracy(tiny_embedder(), eager_runner(classifier), [("meh", "a film")])
