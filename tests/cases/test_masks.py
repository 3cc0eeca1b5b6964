"""Cases of masks, on our classifier and on modules of users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tx_export import runtime
from tx_export.errors import BudgetError, TxExportError
from tx_export.load import load
from tx_export.metrics import fidelity_bound
from tx_export.spec import EagerModel
from tx_export.verify import eager_runner

from .conftest import Once
from .models import build_user, user

Array = NDArray[Any]


def ids(batch: int, tokens: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, 1000, (batch, tokens))


def lengths(*real: int, tokens: int, left: bool = False) -> Array:
    """One row a length, padded on the right or on the left."""
    mask = (np.arange(tokens) < np.array(real)[:, None]).astype(np.int64)
    return mask[:, ::-1] if left else mask


@pytest.fixture(scope="module")
def eager(cls_weights: Path) -> EagerModel:
    return load("classifier", weights=str(cls_weights))


@pytest.fixture(scope="module")
def artifact(cls_artifact: Path) -> runtime.Model:
    return runtime.Model(cls_artifact)


def worst(model: EagerModel, artifact: runtime.Model, feeds: dict[str, Array]) -> float:
    """The largest difference from eager; NaN where anything isn't finite."""
    expected, actual = eager_runner(model)(feeds), artifact.run_arrays(feeds)
    assert list(expected) == list(actual)
    return float(max(np.abs(expected[name] - actual[name]).max() for name in expected))


def test_b001_a_fully_padded_row_changes_no_other_row_and_is_eager_s(
    eager: EagerModel, artifact: runtime.Model
) -> None:
    feeds = {"input_ids": ids(3, 16), "attention_mask": lengths(16, 9, 0, tokens=16)}
    assert worst(eager, artifact, feeds) <= fidelity_bound(0)
    whole = artifact.run_arrays(feeds)["logits"]
    alone = artifact.run_arrays({name: array[:2] for name, array in feeds.items()})["logits"]
    assert np.abs(whole[:2] - alone).max() <= 1e-5  # the case's own bound


@pytest.mark.parametrize("dtype", ["bool", "int32", "uint8", "int8", "uint64"])
def test_b006_a_mask_of_any_integer_dtype_is_the_same_mask(artifact: runtime.Model, dtype: str) -> None:
    feeds = {"input_ids": ids(3, 16), "attention_mask": lengths(16, 9, 4, tokens=16)}
    expected = artifact.run_arrays(feeds)["logits"]
    found = artifact.run_arrays(feeds | {"attention_mask": feeds["attention_mask"].astype(dtype)})["logits"]
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("mask", [np.full((1, 4), "x"), np.ones((1, 4), np.float32), np.ones((1, 4), np.float16)])
def test_b006_another_mask_is_refused_with_its_name_and_the_dtypes(artifact: runtime.Model, mask: Array) -> None:
    with pytest.raises(TxExportError, match=r"attention_mask.*any integer"):
        artifact.run_arrays({"input_ids": ids(1, 4), "attention_mask": mask})


def test_b012_padding_on_the_right_on_the_left_and_in_between_is_honoured(
    eager: EagerModel, artifact: runtime.Model
) -> None:
    holed = np.random.default_rng(3).integers(0, 2, (2, 16))
    for mask in (lengths(16, 9, tokens=16), lengths(16, 9, tokens=16, left=True), holed):
        assert worst(eager, artifact, {"input_ids": ids(2, 16), "attention_mask": mask}) <= fidelity_bound(0)


def test_b014_zeros_for_every_input_give_finite_answers(eager: EagerModel, artifact: runtime.Model) -> None:
    zeros = {name: np.zeros((2, 64), np.int64) for name in ("input_ids", "attention_mask")}
    assert np.isfinite(artifact.run_arrays(zeros)["logits"]).all()
    assert worst(eager, artifact, zeros) <= fidelity_bound(0)


def test_b014_a_pooled_vector_without_a_real_token_is_zero(once: Once) -> None:
    from tx_export.compiler import BuildOptions, build

    folder = once(
        "embedder-fp32",
        lambda path: build(BuildOptions(source="embedder", weights="random", quantize="none", output=path)),
    )
    zeros = {name: np.zeros((2, 64), np.int64) for name in ("input_ids", "attention_mask")}
    assert not runtime.Model(folder).run_arrays(zeros)["embedding"].any()


def test_b008_a_branch_on_the_values_of_a_mask_stops_the_build_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(TxExportError, match=r"user_modules\.py:\d+: .*attention_mask\.bool\(\)\.all\(\)"):
        build_user("SkipsFullMasks", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_eager_that_gives_nan_on_an_empty_row_stops_the_build_with_its_line_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"user_modules\.py:\d+: in attention: .*pass need_weights=False"):
        build_user("WantsWeights", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_b009_a_causal_mask_follows_the_length_and_never_looks_ahead(once: Once) -> None:
    model, folder = load(user("Causal")), once("user-causal", lambda path: build_user("Causal", path))
    artifact = runtime.Model(folder)
    for tokens in (1, 5, 16, 64, 128):
        assert worst(model, artifact, {"input_ids": ids(2, tokens)}) <= fidelity_bound(0)
    before = {"input_ids": ids(1, 12)}
    after = {"input_ids": before["input_ids"].copy()}
    after["input_ids"][0, 7] = (after["input_ids"][0, 7] + 1) % 1000
    change = np.abs(artifact.run_arrays(before)["output_0"] - artifact.run_arrays(after)["output_0"])[0].max(axis=1)
    assert change[:7].max() <= 1e-6 < change[7]  # the convention of the cases for causality


def test_b011_a_mask_with_two_to_four_axes_means_the_same(once: Once) -> None:
    model, folder = load(user("Ranks")), once("user-ranks", lambda path: build_user("Ranks", path))
    artifact = runtime.Model(folder)
    for mask in (lengths(16, 9, 3, tokens=16), lengths(16, 9, 3, tokens=16, left=True), lengths(16, 0, 3, tokens=16)):
        feeds = {"input_ids": ids(3, 16), "attention_mask": mask}
        assert worst(model, artifact, feeds) <= fidelity_bound(0)
        first, *others = artifact.run_arrays(feeds).values()
        assert max(np.abs(other - first).max() for other in others) <= 1e-5  # the case's own bound
    assert runtime.read_manifest(folder)["fused"] == {"done": 5, "of": 5, "left": []}


@pytest.mark.parametrize("shape", [(16,), (1, 1, 1, 1, 16)])
def test_b011_a_mask_of_another_rank_is_refused_with_the_rank_that_fits(
    artifact: runtime.Model, shape: tuple[int, ...]
) -> None:
    # An artifact's masks are 2-D; other ranks are a matter of the module.
    with pytest.raises(TxExportError, match=r"attention_mask.*batch.*tokens"):
        artifact.run_arrays({"input_ids": ids(1, 16), "attention_mask": np.ones(shape, np.int64)})
