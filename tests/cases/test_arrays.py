"""Cases of inputs and outputs: which arrays are taken, and what is said about the others."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tx_export.compiler import BuildOptions, build
from tx_export.load import load
from tx_export.runtime import Model, TxExportError, read_manifest

from .conftest import Once

_IDS = np.array([[2, 40, 61, 3, 0, 0], [2, 55, 70, 61, 90, 3]])
_MASK = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def model(cls_artifact: Path) -> Model:
    return Model(cls_artifact, threads=1)


def answer(model: Model, ids: Any = _IDS, mask: Any = _MASK) -> np.ndarray:
    return model.run_arrays({"input_ids": ids, "attention_mask": mask})["logits"]


@pytest.mark.parametrize("dtype", ["int32", "int16", "uint8", "int8", "uint64", ">i4", "list", "tuple", "tensor"])
def test_b220_integers_of_any_kind_give_the_same_bits(model: Model, dtype: str) -> None:
    convert: Mapping[str, Any] = {
        "list": np.ndarray.tolist,
        "tuple": lambda array: tuple(map(tuple, array.tolist())),
        "tensor": torch.from_numpy,
    }
    change = convert.get(dtype, lambda array: array.astype(dtype))
    assert np.array_equal(answer(model, change(_IDS), change(_MASK)), answer(model))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "object", "str", "M8[D]"])
@pytest.mark.parametrize("name", ["input_ids", "attention_mask"])
def test_b220_other_kinds_are_refused_with_input_given_and_accepted_dtype(model: Model, name: str, dtype: str) -> None:
    feeds = {"input_ids": _IDS, "attention_mask": _MASK}
    feeds[name] = feeds[name].astype(dtype)
    message = f"input '{name}': dtype {feeds[name].dtype} given; accepted: bool and any integer"
    with pytest.raises(TxExportError, match=re.escape(message)):
        model.run_arrays(feeds)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 2], [3]], r"input 'input_ids': .*inhomogeneous.*; expected input_ids:int64\[batch,tokens<=128\]"),
        ([[1, None]], "input 'input_ids': dtype object given"),
        ([[10**30]], "input 'input_ids': dtype object given"),
        ([[2**63]], "input 'input_ids': uint64 values don't fit into int64"),
        (7, r"input 'input_ids': shape \[\] has 0 dims, not 2"),
        ([2, 40, 3], r"input 'input_ids': shape \[3\] has 1 dims, not 2"),
        ([[[2, 40]]], r"input 'input_ids': shape \[1, 1, 2\] has 3 dims, not 2"),
        ([], r"input 'input_ids': shape \[0\] has 1 dims, not 2"),
        ([[]], "inputs: tokens is 0; at least 1 is needed"),
        (b"text", "input 'input_ids': dtype .S4 given"),
        (torch.ones(1, 2, requires_grad=True), r"input 'input_ids': .*requires grad.*; expected input_ids:int64"),
    ],
)
def test_b220_what_is_no_matrix_of_integers_is_refused(model: Model, ids: Any, message: str) -> None:
    with pytest.raises(TxExportError, match=message):
        model.run_arrays({"input_ids": ids})


def test_b222_any_memory_layout_gives_the_same_bits(model: Model) -> None:
    read_only = _IDS.copy()
    read_only.flags.writeable = False
    layouts = {
        "transposed": _IDS.T.copy().T,
        "every second column": np.repeat(_IDS, 2, axis=1)[:, ::2],
        "backwards": _IDS[::-1, ::-1].copy()[::-1, ::-1],
        "Fortran": np.asfortranarray(_IDS),
        "part of a larger one": np.pad(_IDS, 3)[3:-3, 3:-3],
        "read only": read_only,
    }
    found = {name: answer(model, ids, np.asfortranarray(_MASK)) for name, ids in layouts.items()}
    assert all(np.array_equal(array, answer(model)) for array in found.values())
    # A row that is repeated without memory of its own: the rows of one answer.
    repeated = answer(model, np.broadcast_to(_IDS[1], (3, 6)), np.broadcast_to(_MASK[1], (3, 6)))
    assert all(np.array_equal(row, repeated[0]) for row in repeated)


@pytest.mark.parametrize(
    ("feeds", "parts"),
    [
        ({"foo": _IDS, "input_ids": _IDS}, ["unknown foo"]),
        ({"input_idz": _IDS}, ["missing input_ids:int64[batch,tokens<=128]", "unknown input_idz"]),
        ({}, ["missing input_ids:int64[batch,tokens<=128]"]),
        ({3: _IDS, "input_ids": _IDS, b"x": 1}, ["unknown 3, b'x'"]),
        ([_IDS], ["list given; expected arrays by name"]),
        (_IDS, ["ndarray given; expected arrays by name"]),
        (None, ["NoneType given; expected arrays by name"]),
        ("input_ids", ["str given; expected arrays by name"]),
    ],
)
def test_b227_missing_and_unknown_inputs_are_listed_with_the_expected(
    model: Model, feeds: Any, parts: list[str]
) -> None:
    with pytest.raises(TxExportError) as caught:
        model.run_arrays(feeds)
    message = str(caught.value)
    assert message.startswith("inputs: ") and all(part in message for part in parts)
    assert message.endswith("input_ids:int64[batch,tokens<=128], attention_mask:int64[batch,tokens<=128]")


def test_b227_a_mask_that_is_left_out_means_that_all_positions_are_real(model: Model) -> None:
    assert np.array_equal(model.run_arrays({"input_ids": _IDS})["logits"], answer(model, mask=np.ones_like(_MASK)))


_USER = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 2.0]))
        self.up = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x, mask):
        h = torch.tanh(self.up(x)) * mask[:, :, None]
        return {"logits": self.head(h.sum(1)), "hidden": h, "aux": None}

class Odd(Net):
    def forward(self, x, mask):
        return super().forward(x, mask) | {"n": 3, "mask": mask, "scale": self.scale}
"""
_INPUTS = ("x:float32[batch,tokens,4]", "mask:int64[batch,tokens]")


@pytest.fixture(scope="module")
def features(once: Once) -> Path:
    """A user's module over float features that returns a dict, in fp32, with its file beside it."""

    def make(folder: Path) -> None:
        file = folder.parent / "features_of_a_user.py"
        file.write_text(_USER, encoding="utf-8")
        build(BuildOptions(source=f"{file}:Net", inputs=_INPUTS, quantize="none", output=folder))

    return once("features", make)


def test_b225_outputs_are_named_as_the_keys_and_none_is_dropped(features: Path) -> None:
    manifest = read_manifest(features)
    assert [item["name"] for item in manifest["outputs"]] == ["logits", "hidden"]
    assert [item["dims"] for item in manifest["outputs"]] == [["batch", 3], ["batch", "tokens", 8]]


def test_b225_numbers_are_dropped_and_inputs_and_constants_among_the_outputs_are_flagged(
    features: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tx_export"):
        model = load(f"{features.parent / 'features_of_a_user.py'}:Odd", inputs=_INPUTS)
    assert [spec.name for spec in model.outputs] == ["logits", "hidden", "mask_out", "scale"]
    said = [record.getMessage() for record in caplog.records]
    for notice in (
        "dropped, as they are no tensors: aux (None), n (int)",
        "outputs that are an input as it is: 'mask_out' is 'mask'",
        "outputs that are the same whatever the inputs hold: 'scale'",
    ):
        assert any(line.endswith(notice) for line in said)


@pytest.mark.parametrize("dtype", ["float64", "float16", "float32", ">f4", "int8", "bool"])
def test_b221_floats_of_any_width_are_converted(features: Path, dtype: str) -> None:
    x = (np.arange(24).reshape(2, 3, 4) / 8 - 1.5).astype(dtype)  # exact in each of the dtypes
    opened = Model(features, threads=1)
    found = opened.run_arrays({"x": x, "mask": np.ones((2, 3), bool)})
    expected = opened.run_arrays({"x": x.astype(np.float32), "mask": np.ones((2, 3), int)})
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.full((1, 1, 4), 1e300), "input 'x': float64 values don't fit into float32"),
        (np.zeros((1, 1, 4), complex), "input 'x': dtype complex128 given; accepted: any float, integer or bool"),
        (np.zeros((1, 1, 5)), r"input 'x': a dim is 5 and must be 4: x:float32\[batch,tokens,4\]"),
        (np.zeros((1, 4)), r"input 'x': shape \[1, 4\] has 2 dims, not 3"),
        (np.array([[["a"] * 4]]), "input 'x': dtype <U1 given"),
        (np.full((1, 1, 4), np.nan), "input 'x': nan at row 0, position 0, channel 0; allowed finite numbers"),
        (np.array([[[0, 1, 2, -np.inf]]]), "input 'x': -inf at row 0, position 0, channel 3; allowed finite numbers"),
    ],
)
def test_b221_features_that_do_not_fit_are_refused(features: Path, x: np.ndarray, message: str) -> None:
    with pytest.raises(TxExportError, match=message):
        Model(features, threads=1).run_arrays({"x": x, "mask": np.ones((1, 1), int)})
