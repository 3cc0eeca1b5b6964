"""Fidelity: planted faults are caught with the right name. Stand-ins are changed copies of the eager module."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tx_export.errors import BudgetError
from tx_export.metrics import Budget
from tx_export.models.parts.positions import sinusoidal_table
from tx_export.spec import EagerModel
from tx_export.testing import eager_model, tiny_classifier, tiny_embedder
from tx_export.verify import Judge, Runner, Step, eager_runner

from .lines import LINES

Array = NDArray[Any]


@pytest.fixture(scope="module")
def classifier() -> EagerModel:
    return tiny_classifier()


@pytest.fixture(scope="module")
def judge(classifier: EagerModel) -> Judge:
    """For exact checks only: lossy ones widen what later ones may cause."""
    return Judge(classifier, LINES)


def changed(model: EagerModel, change: Callable[[Any], object]) -> Runner:
    """A runner over a changed copy of the module."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        change(module)
    return eager_runner(model, module)


def spoil(model: EagerModel, value: float) -> None:
    head: Any = model.module.get_submodule("head")
    with torch.no_grad():
        head.bias[0] = value


def refusal(judge: Judge, runner: Runner, step: str = "fuse_gelu") -> str:
    with pytest.raises(BudgetError) as caught:
        judge.check_exact(step, runner)
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert message.startswith(f"{step}: output 'logits'")
    assert "\n" not in message
    return message


def test_the_untouched_module_passes_and_is_recorded(classifier: EagerModel) -> None:
    judge = Judge(classifier, LINES)
    record = judge.check_exact("export", eager_runner(classifier))
    assert record["outputs"]["logits"] | {"cosine": 1.0} == {
        "max_abs": 0.0,
        "sqnr_db": None,
        "cosine": 1.0,
        "agreement": 1.0,
        "non_finite": 0,
    }
    assert (record["pass"], record["kind"], record["budget"]) == ("export", "fidelity", "max_abs=0.0001,sqnr_db=90")
    verification = judge.verification()
    assert verification["passes"] == [record]
    assert verification["overall"]["outputs"] == record["outputs"]
    json.dumps(verification, allow_nan=False)


def test_a_missing_scale_of_attention_is_caught(classifier: EagerModel, judge: Judge) -> None:
    def unscaled(module: Any) -> None:
        module.encoder.layers[0].attention.scale = 1.0  # instead of 1 / sqrt(head_dim)

    message = refusal(judge, changed(classifier, unscaled))
    assert "more than 0.0001, in case" in message
    assert "mask at [" in message


def test_a_swapped_head_is_caught(classifier: EagerModel, judge: Judge) -> None:
    def swap(module: Any) -> None:
        weight = module.encoder.layers[1].attention.value.weight  # [num_heads * head_dim, d_model]
        weight.copy_(weight.unflatten(0, (4, -1))[[1, 0, 2, 3]].flatten(0, 1).clone())

    assert "is off by" in refusal(judge, changed(classifier, swap))


def test_b259_a_nan_that_eager_does_not_have_is_caught(classifier: EagerModel, judge: Judge) -> None:
    def break_a_weight(module: Any) -> None:
        module.head.weight[1, 3] = torch.nan

    message = refusal(judge, changed(classifier, break_a_weight))
    assert "has non-finite values (eager 0, here " in message
    # The first case of the grid, its first row, the label whose weight is NaN.
    assert "the first in case 1x1 full mask at [0, 1]: nan instead of" in message


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_b259_the_same_non_finite_value_on_both_sides_is_caught(value: float) -> None:
    model = tiny_classifier()
    spoil(model, value)
    for budget in (None, Budget()):
        failure = Judge(model, LINES).judge(Step("export", eager_runner(model), budget)).failure
        assert failure is not None
        assert re.match(r"export: output 'logits' has non-finite values \(eager ([1-9]\d*), here \1\)", failure)


def test_a_mask_off_by_one_is_caught(classifier: EagerModel, judge: Judge) -> None:
    eager = eager_runner(classifier)

    def shifted(feeds: Mapping[str, Array]) -> dict[str, Array]:
        return eager(dict(feeds) | {"attention_mask": np.roll(feeds["attention_mask"], 1, axis=1)})

    message = refusal(judge, shifted)
    assert "full mask" not in message


def test_b008_an_ignored_mask_is_caught(classifier: EagerModel, judge: Judge) -> None:
    eager = eager_runner(classifier)

    def ignoring(feeds: Mapping[str, Array]) -> dict[str, Array]:
        return eager(dict(feeds) | {"attention_mask": np.ones_like(feeds["attention_mask"])})

    assert "full mask" not in refusal(judge, ignoring)


def test_swapped_batch_rows_are_caught(classifier: EagerModel, judge: Judge) -> None:
    eager = eager_runner(classifier)

    def swapped(feeds: Mapping[str, Array]) -> dict[str, Array]:
        return {name: array[::-1] for name, array in eager(feeds).items()}

    message = refusal(judge, swapped)
    assert "in case 2x" in message or "in case 5x" in message


class _FrontPositions(nn.Module):
    def forward(self, attention_mask: Tensor) -> Tensor:
        return sinusoidal_table(attention_mask.shape[1], 16).expand(attention_mask.shape[0], -1, -1)


def test_positions_counted_from_the_front_are_caught(classifier: EagerModel, judge: Judge) -> None:
    def from_the_front(module: Any) -> None:
        module.encoder.positions = _FrontPositions()

    message = refusal(judge, changed(classifier, from_the_front))
    assert "left mask" in message or "holed mask" in message


class _MeanByLength(nn.Module):
    """Embeddings summed and divided by the number of positions, which a trace would make a constant."""

    def __init__(self, length: int | None = None) -> None:
        super().__init__()
        self.embedding, self.length = nn.Embedding(10, 4), length

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        x = self.embedding(input_ids) * attention_mask[..., None]
        return x.sum(dim=1) / (self.length or input_ids.shape[1])


def _mean_by_length() -> EagerModel:
    torch.manual_seed(0)
    dims = "[batch,tokens<=24]"
    return eager_model(
        _MeanByLength(), [f"input_ids:int64{dims}{{0..9}}", f"attention_mask:int64{dims}"], ["mean:float32[batch,4]"]
    )


def test_b030_a_constant_that_is_right_at_one_length_only_is_caught() -> None:
    model = _mean_by_length()

    def traced_at_17(module: Any) -> None:
        module.length = 17

    with pytest.raises(BudgetError, match=r"export: output 'mean' is off by .* in case \dx(1|2|24) "):
        Judge(model).check_exact("export", changed(model, traced_at_17))


class _Last(nn.Module):
    """The last position's embedding, or that of a fixed one."""

    def __init__(self, position: int = -1) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(10, 4), position

    def forward(self, input_ids: Tensor) -> Any:
        position = self.position if self.position < 0 else min(self.position, input_ids.shape[1] - 1)
        return self.embedding(input_ids[:, position])


def test_a_fixed_last_token_is_caught_at_the_maximum_length() -> None:
    model = eager_model(_Last(), ["input_ids:int64[batch,tokens<=24]{0..9}"], ["last:float32[batch,4]"])

    def fixed(module: Any) -> None:
        module.position = 16

    with pytest.raises(BudgetError, match=r"export: output 'last' is off by .* in case 1x24 full mask at \[0, \d\]"):
        Judge(model).check_exact("export", changed(model, fixed))


@pytest.mark.parametrize("make", [tiny_classifier, tiny_embedder])
def test_b001_b014_a_nan_on_an_empty_row_is_caught(make: Callable[[], EagerModel]) -> None:
    model = make()
    eager = eager_runner(model)

    def softmax_of_nothing(feeds: Mapping[str, Array]) -> dict[str, Array]:
        empty = feeds["attention_mask"].sum(axis=1, keepdims=True) == 0
        return {name: np.where(empty, np.float32(np.nan), array) for name, array in eager(feeds).items()}

    with pytest.raises(
        BudgetError, match=r"has non-finite values \(eager 0, here \d+\), the first in case 1x1 empty mask"
    ):
        Judge(model, LINES).check_exact("export", softmax_of_nothing)
