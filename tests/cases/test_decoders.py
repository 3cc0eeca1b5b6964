"""Cases of weights and 8 bits in the built-in decoders: what is shared is stored once, in one file for two graphs."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from tx_export.compiler import BuildOptions, build
from tx_export.load import load
from tx_export.metrics import fidelity_bound
from tx_export.runtime import Model, self_test

_SMALL = {"num_layers": "1", "d_ff": "96", "max_length": "32"}


@functools.cache
def _unique_bytes(source: str, settings: tuple[tuple[str, str], ...]) -> int:
    module = load(source, settings=dict(settings), weights="random:0").module
    return sum(parameter.numel() * 4 for parameter in module.parameters())


def test_b050_a_tied_table_of_a_decoder_is_stored_once(tmp_path: Path) -> None:
    settings = {**_SMALL, "vocab_size": "32000", "d_model": "96"}
    options = BuildOptions(source="lm", settings=settings, weights="random:0", output=tmp_path / "a", quantize="none")
    folder = build(options)
    assert sum(path.stat().st_size for path in folder.glob("model.onnx*")) <= 14e6
    ids = np.random.default_rng(0).integers(4, 32000, (2, 9))
    module = load("lm", settings=settings, weights="random:0").module
    import torch

    with torch.no_grad():
        expected = module(torch.from_numpy(ids), torch.ones(2, 9, dtype=torch.int64)).numpy()
    found = Model(folder).run_arrays({"input_ids": ids})["logits"]
    assert np.abs(found - expected).max() <= fidelity_bound(np.abs(expected).max())


@pytest.mark.parametrize("quantize", ["none", "dynamic_int8"])
def test_b060_b121_encoder_and_decoder_share_their_weights_on_disk(quantize: str, tmp_path: Path) -> None:
    settings = {**_SMALL, "vocab_size": "8000"}
    options = BuildOptions(
        source="seq2seq", settings=settings, weights="random:0", output=tmp_path / "a", quantize=quantize
    )
    folder = build(options)
    unique = _unique_bytes("seq2seq", tuple(settings.items()))
    files = ("encoder.onnx", "decoder.onnx", "model.onnx.data")
    assert sum((folder / name).stat().st_size for name in files) <= 1.15 * unique
    artifact = Model(folder)
    assert self_test(artifact)["agrees"]
    if quantize == "none":
        return
    quantized = artifact.manifest["quantized"]
    assert quantized["done"] == quantized["of"] and quantized["stored"]
    assert sum((folder / name).stat().st_size for name in files) <= 0.4 * unique
