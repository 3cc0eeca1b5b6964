"""Fidelity: which positions, rows and modules are compared, and runners that fail."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tx_export.errors import BudgetError, LoadError
from tx_export.spec import EagerModel
from tx_export.testing import eager_model, tiny_classifier, tiny_embedder
from tx_export.verify import Judge, Runner, eager_runner

from .lines import LINES

Array = NDArray[Any]


@pytest.fixture(scope="module")
def classifier() -> EagerModel:
    return tiny_classifier()


@pytest.fixture(scope="module")
def judge(classifier: EagerModel) -> Judge:
    """For exact checks only: lossy ones widen what later ones may cause."""
    return Judge(classifier, LINES)


def test_an_empty_row_has_no_oracle_where_padding_is_promised_on_the_right_only() -> None:
    ours = tiny_classifier()
    theirs = eager_model(ours.module, ours.inputs, ours.outputs, family="bert", task=ours.task, padding="right")
    eager = eager_runner(ours)

    def other_on_empty_rows(value: float) -> Runner:
        def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
            empty = feeds["attention_mask"].sum(axis=1, keepdims=True) == 0
            return {name: np.where(empty, np.float32(value), array) for name, array in eager(feeds).items()}

        return run

    with pytest.raises(BudgetError, match=r"off by .* empty mask"):
        Judge(ours, LINES).check_exact("export", other_on_empty_rows(0.25))
    Judge(theirs).check_exact("export", other_on_empty_rows(0.25))
    with pytest.raises(BudgetError, match=r"non-finite values"):
        Judge(theirs).check_exact("export", other_on_empty_rows(np.nan))


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.embedding(input_ids), input_ids.float()


def test_values_at_padding_may_differ_but_at_real_positions_may_not() -> None:
    dims = "[batch,tokens<=24]"
    model = eager_model(
        _Tokens(),
        [f"input_ids:int64{dims}{{0..9}}", f"attention_mask:int64{dims}"],
        ["hidden:float32[batch,tokens,4]", "score:float32[batch,tokens]"],
    )
    eager = eager_runner(model)

    def add(at: int) -> Runner:
        def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
            there = (feeds["attention_mask"] == at).astype(np.float32)
            found = eager(feeds)
            return {"hidden": found["hidden"] + there[..., None], "score": found["score"] + there}

        return run

    record = Judge(model).check_exact("export", add(at=0))
    assert record["outputs"]["hidden"]["max_abs"] == record["outputs"]["score"]["max_abs"] == 0.0
    assert record["outputs"]["score"]["cosine"] is None
    with pytest.raises(BudgetError, match=r"output 'hidden' is off by 1, more than 0.0001"):
        Judge(model).check_exact("export", add(at=1))


class _TorchEncoder(nn.Module):
    """torch's own encoder, whose fast path raises on a batch in which every row is empty."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embedding, self.encoder = nn.Embedding(10, 8), nn.TransformerEncoder(layer, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)


def test_eager_runs_without_the_fast_path_and_once_for_all_checks() -> None:
    torch.manual_seed(0)
    dims = "[batch,tokens<=24]"
    inputs = [f"input_ids:int64{dims}{{0..9}}", f"attention_mask:int64{dims}"]
    model = eager_model(_TorchEncoder(), inputs, ["hidden:float32[batch,tokens,8]"])
    runner, runs = eager_runner(model, copy.deepcopy(model.module)), [0]

    def count(*_: Any) -> None:
        runs[0] += 1

    model.module.register_forward_hook(count)
    judge, before = Judge(model), torch.backends.mha.get_fastpath_enabled()
    judge.check_exact("export", runner)
    first = runs[0]
    judge.check_exact("fuse_gelu", runner)
    assert runs[0] == first > 0
    assert torch.backends.mha.get_fastpath_enabled() == before


class _Transposed(nn.Module):
    """Scores [tokens, batch] of the ids, and weights [batch, heads, tokens, tokens] between them."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        x = input_ids.float()
        return x.T, (x[:, None, :, None] * x[:, None, None, :]).expand(-1, 2, -1, -1)


@pytest.mark.parametrize("output", ["scores", "weights"])
def test_real_positions_are_found_on_every_axis_of_tokens(output: str) -> None:
    dims = "[batch,tokens<=24]"
    model = eager_model(
        _Transposed(),
        [f"input_ids:int64{dims}{{1..9}}", f"attention_mask:int64{dims}"],
        ["scores:float32[tokens,batch]", "weights:float32[batch,2,tokens,tokens]"],
    )
    eager = eager_runner(model)

    def add(at_real: bool) -> Runner:
        def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
            real = feeds["attention_mask"] != 0  # [B, T]
            found = eager(feeds)
            places = {"scores": real.T, "weights": (real[:, None, :, None] & real[:, None, None, :])}
            wrong = (places[output] == at_real).astype(np.float32)
            return found | {output: found[output] + wrong}

        return run

    Judge(model).check_exact("export", add(at_real=False))
    with pytest.raises(BudgetError, match=rf"output '{output}' is off by 1, more than "):
        Judge(model).check_exact("export", add(at_real=True))


def test_small_outputs_are_held_to_decibels() -> None:
    model = tiny_embedder()
    eager = eager_runner(model)
    # Components of a unit vector are at most 1: 9e-5 of them is inside 1e-4, but 20 log10(1 / 9e-5) is 80.9 dB only.
    off: Runner = lambda feeds: {name: array * np.float32(1 + 9e-5) for name, array in eager(feeds).items()}  # noqa: E731
    with pytest.raises(
        BudgetError, match=r"export: output 'embedding': sqnr_db 80\.9\d? is less than 90, worst in case"
    ):
        Judge(model, LINES).check_exact("export", off)


def test_the_exported_module_is_the_reference_of_fidelity(classifier: EagerModel) -> None:
    pruned = copy.deepcopy(classifier.module)
    output: Any = pruned.get_submodule("encoder.layers.0.attention.output")
    with torch.no_grad():
        output.weight[:, :4] = 0
    judge, runner = Judge(classifier, LINES), eager_runner(classifier, pruned)
    judge.check_exact("fuse_gelu", runner, pruned)
    with pytest.raises(BudgetError, match=r"fuse_gelu"):
        judge.check_exact("fuse_gelu", runner)


def test_a_runner_that_fails_at_a_promised_shape_is_named_with_the_case(classifier: EagerModel, judge: Judge) -> None:
    eager = eager_runner(classifier)

    def only_one_row(feeds: Mapping[str, Array]) -> dict[str, Array]:
        if len(feeds["input_ids"]) > 1:
            raise RuntimeError("Got invalid dimensions for input\nmore text")
        return eager(feeds)

    with pytest.raises(BudgetError, match=r"^export: fails in case 2x1 full mask: Got invalid dimensions for input$"):
        judge.check_exact("export", only_one_row)


def test_another_shape_or_a_missing_output_is_named(classifier: EagerModel, judge: Judge) -> None:
    eager = eager_runner(classifier)
    with pytest.raises(BudgetError, match=r"export: output 'logits' has shape \[1, 1\] in case .* eager has \[1, 2\]"):
        judge.check_exact("export", lambda feeds: {"logits": eager(feeds)["logits"][:, :1]})
    with pytest.raises(BudgetError, match=r"export: output 'logits' is missing; there are scores"):
        judge.check_exact("export", lambda feeds: {"scores": eager(feeds)["logits"]})


def test_eager_that_raises_is_an_error_with_the_shapes() -> None:
    model = tiny_embedder()

    def short(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].shape[1] > 20:
            raise IndexError("index out of range in self")

    runner = eager_runner(tiny_embedder())
    model.module.register_forward_pre_hook(short)
    with pytest.raises(LoadError, match=r"tiny: eager fails with input_ids \[1, 32\].*IndexError: index out of range"):
        Judge(model, LINES).check_exact("export", runner)
