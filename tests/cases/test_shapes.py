"""Cases of shapes that vary, on our classifier and on modules of users."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch.backends import mha

from tx_export import runtime
from tx_export.errors import TxExportError
from tx_export.load import load
from tx_export.metrics import fidelity_bound

from .conftest import Once
from .models import build_user, user
from .test_masks import ids, lengths, worst


@pytest.mark.parametrize("name", ["Stock", "StockNormFirst", "StockUnmasked"])
def test_b020_a_stock_encoder_takes_every_batch_and_length_with_the_fast_path_off(once: Once, name: str) -> None:
    was = mha.get_fastpath_enabled()
    model, folder = load(user(name)), once(f"user-{name}", lambda path: build_user(name, path))
    assert mha.get_fastpath_enabled() == was  # B023
    artifact = runtime.Model(folder)
    for batch, tokens in ((1, 16), (3, 16), (2, 7), (5, 33), (1, 1), (1, 128)):
        feeds = {"input_ids": ids(batch, tokens)}
        if name != "StockUnmasked":
            feeds["attention_mask"] = lengths(*(tokens - row % tokens for row in range(batch)), tokens=tokens)
        assert worst(model, artifact, feeds) <= fidelity_bound(0)
    layers = 1 if name == "StockUnmasked" else 2
    assert runtime.read_manifest(folder)["fused"] == {"done": layers, "of": layers, "left": []}


def test_a_stock_encoder_with_a_padding_mask_is_fused_and_quantized_in_every_layer(once: Once) -> None:
    manifest = runtime.read_manifest(once("stock-int8", lambda path: build_user("Stock", path, "dynamic_int8")))
    assert manifest["fused"] == {"done": 2, "of": 2, "left": []}
    counted = {key: manifest["quantized"][key] for key in ("done", "of", "left")}
    assert counted == {"done": 9, "of": 9, "left": []}  # 2 layers of 4 products, and the table of words


def test_an_output_without_axes_is_right_at_every_shape(once: Once) -> None:
    model, artifact = load(user("Loss")), runtime.Model(once("user-loss", lambda path: build_user("Loss", path)))
    for batch, tokens in ((1, 1), (3, 9)):
        feeds = {"input_ids": ids(batch, tokens), "attention_mask": np.ones((batch, tokens), np.int64)}
        assert artifact.run_arrays(feeds)["output_0"].shape == ()
        assert worst(model, artifact, feeds) <= fidelity_bound(0)


def test_b023_the_fast_path_is_as_it_was_behind_a_failed_build(tmp_path: Path) -> None:
    for enabled in (True, False):
        mha.set_fastpath_enabled(enabled)
        try:
            with pytest.raises(TxExportError):
                build_user("SkipsFullMasks", tmp_path / "out")
            assert mha.get_fastpath_enabled() == enabled
        finally:
            mha.set_fastpath_enabled(True)


def test_b021_b022_no_size_of_an_example_is_frozen(once: Once) -> None:
    # Nobody gives an example: sizes come from the declared dims, and none of them is 0 or 1.
    model, folder = load(user("Causal")), once("user-causal", lambda path: build_user("Causal", path))
    for batch, tokens in ((1, 8), (4, 20), (1, 1), (3, 2), (1, 12)):
        assert worst(model, runtime.Model(folder), {"input_ids": ids(batch, tokens)}) <= fidelity_bound(0)


def test_b024_an_input_that_is_too_long_is_refused_with_both_numbers(cls_artifact: Path) -> None:
    artifact = runtime.Model(cls_artifact)
    feeds = {"input_ids": ids(1, 128), "attention_mask": np.ones((1, 128), np.int64)}
    assert artifact.run_arrays(feeds)["logits"].shape == (1, 3)
    for tokens in (129, 500):
        with pytest.raises(TxExportError, match=rf"{tokens}.*128|128.*{tokens}"):
            artifact.run_arrays({"input_ids": ids(1, tokens), "attention_mask": np.ones((1, tokens), np.int64)})


def test_b026_an_empty_batch_is_an_empty_answer(cls_artifact: Path) -> None:
    artifact = runtime.Model(cls_artifact)
    empty = {name: np.zeros((0, 16), np.int64) for name in ("input_ids", "attention_mask")}
    assert artifact.run_arrays(empty)["logits"].shape == (0, 3)
    assert artifact([]) == []


def test_b028_a_module_with_einops_is_fused_and_takes_every_shape(once: Once) -> None:
    model, folder = load(user("Einops")), once("user-einops", lambda path: build_user("Einops", path))
    for batch, tokens in ((2, 16), (3, 9), (1, 40), (1, 1)):
        assert worst(model, runtime.Model(folder), {"input_ids": ids(batch, tokens)}) <= fidelity_bound(0)
    assert runtime.read_manifest(folder)["fused"] == {"done": 1, "of": 1, "left": []}


def test_b030_a_length_made_a_python_number_stops_the_build_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(TxExportError, match=r"user_modules\.py:\d+: .*int\(input_ids\.shape\[1\]\).*tokens"):
        build_user("DividesByLength", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["LastToken", "FirstFromTheEnd"])
def test_b032_the_last_token_of_each_row_is_its_own(once: Once, name: str) -> None:
    folder = once(f"user-{name}", lambda path: build_user(name, path))
    artifact = runtime.Model(folder)
    rows, real = ids(3, 12), (12, 4, 9) if name == "LastToken" else (12, 12, 12)
    feeds = {"input_ids": rows} | ({"attention_mask": lengths(*real, tokens=12)} if name == "LastToken" else {})
    whole = artifact.run_arrays(feeds)["output_0"]
    for row, length in enumerate(real):
        single = {feed: array[row : row + 1, :length] for feed, array in feeds.items()}
        assert np.abs(artifact.run_arrays(single)["output_0"][0] - whole[row]).max() <= fidelity_bound(0)
        assert worst(load(user(name)), artifact, single) <= fidelity_bound(0)


def test_b042_a_table_that_grows_in_forward_is_grown_once_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = build_user("GrowingTable", tmp_path / "out")
    assert "GrowingTable: table had to grow to the largest inputs" in caplog.text
    model = load(user("GrowingTable"))
    for tokens in (8, 16, 64, 128):
        assert worst(model, runtime.Model(folder), {"input_ids": ids(2, tokens)}) <= fidelity_bound(0)


def test_b047_complex_rotations_are_right_with_a_notice_that_names_the_real_form(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = build_user("ComplexRotary", tmp_path / "out")
    assert "write the real form" in caplog.text
    model = load(user("ComplexRotary"))
    for batch, tokens in ((1, 1), (2, 9), (3, 40)):
        # The case's own bound.
        assert worst(model, runtime.Model(folder), {"input_ids": ids(batch, tokens)}) <= 1e-5
