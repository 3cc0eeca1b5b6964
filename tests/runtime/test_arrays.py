"""Arrays in, arrays out: what is converted, what is refused, and in which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, save

from tx_export.runtime import Model, TxExportError

from .artifact import LIMIT, make_artifact, seal
from .artifact import logits as reference

IDS = np.array([[2, 4, 6, 3, 0, 0], [2, 5, 7, 6, 9, 3]])
MASK = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
# A mean of at most 6 float32 products of width 8 errs by at most a few units of the last place of values below 10.
ROUNDING = 8 * 10 * 2.0**-23


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_artifact(tmp_path_factory.mktemp("arrays") / "a"), threads=1)


def answer(model: Model, ids: Any = IDS, mask: Any = MASK, **others: Any) -> np.ndarray:
    return model.run_arrays({"input_ids": ids, "attention_mask": mask, **others})["logits"]


def test_the_outputs_are_those_of_the_formula(model: Model) -> None:
    types = np.array([[0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])
    assert np.abs(answer(model, token_type_ids=types) - reference(IDS, MASK, types)).max() <= ROUNDING


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_integers_of_any_width_give_the_same_bits(model: Model, dtype: str) -> None:
    assert np.array_equal(answer(model, IDS.astype(dtype), MASK.astype(dtype)), answer(model))


def test_a_mask_of_bools_and_plain_lists_give_the_same_bits(model: Model) -> None:
    assert np.array_equal(answer(model, IDS.tolist(), MASK.astype(bool)), answer(model))


def test_any_memory_layout_gives_the_same_bits(model: Model) -> None:
    strided = np.repeat(IDS, 2, axis=1)[:, ::2]
    reversed_twice = IDS[::-1].copy()[::-1]
    transposed = IDS.T.copy().T
    big_endian = IDS.astype(">i8")
    for ids in (strided, reversed_twice, transposed, np.asfortranarray(IDS), big_endian):
        assert np.array_equal(answer(model, ids, np.asfortranarray(MASK)), answer(model))


def test_a_large_batch_gives_the_same_as_its_rows(model: Model) -> None:
    ids = np.random.default_rng(1).integers(0, 15, (100, 16))
    assert ids.size > model._sessions.batch_tokens
    rows = np.concatenate([model.run_arrays({"input_ids": row[None]})["logits"] for row in ids])
    found = model.run_arrays({"input_ids": np.asfortranarray(ids)})["logits"]
    assert found.dtype == np.float32 and np.abs(found - rows).max() <= ROUNDING


def test_a_missing_mask_means_that_all_positions_are_real_and_missing_types_are_zero(model: Model) -> None:
    found = model.run_arrays({"input_ids": IDS})["logits"]
    assert np.array_equal(found, answer(model, mask=np.ones_like(IDS), token_type_ids=np.zeros_like(IDS)))


def test_a_mask_without_a_real_token_gives_a_finite_answer(model: Model) -> None:
    assert np.isfinite(answer(model, np.zeros((2, 8), int), np.zeros((2, 8), int))).all()


def test_an_empty_batch_gives_empty_outputs(model: Model) -> None:
    found = model.run_arrays({"input_ids": np.zeros((0, 6), np.int64)})["logits"]
    assert found.shape == (0, 2) and found.dtype == np.float32


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        (
            {"input_ids": IDS.astype(np.float32)},
            "input 'input_ids': dtype float32 given; accepted: bool and any integer",
        ),
        ({"input_ids": IDS, "attention_mask": MASK * 1.0}, "input 'attention_mask': dtype float64 given"),
        ({"input_ids": [["a"]]}, "input 'input_ids': dtype <U1 given"),
        ({"input_ids": [[1, 2], [3]]}, r"input 'input_ids': .*; expected input_ids:int64\[batch,tokens<=16\]"),
        ({"input_ids": [[2**63]]}, "input 'input_ids': uint64 values don't fit into int64"),
        ({"input_ids": IDS[0]}, r"input 'input_ids': shape \[6\] has 1 dims, not 2: input_ids:int64\[batch,tokens"),
        ({"input_ids": IDS, "attention_mask": MASK[:, :5]}, "'attention_mask': tokens is 5, but 6 in 'input_ids'"),
        ({"input_ids": IDS, "attention_mask": MASK[:1]}, "input 'attention_mask': batch is 1, but 2 in 'input_ids'"),
        ({"input_ids": np.zeros((1, 17), int)}, f"input 'input_ids': tokens is 17; the limit is {LIMIT}"),
        ({"input_ids": np.zeros((1, 500), int)}, f"tokens is 500; the limit is {LIMIT}"),
        ({"input_ids": np.zeros((2, 0), int)}, "inputs: tokens is 0; at least 1 is needed"),
        ({"input_ids": [[2, 3], [2, -1]]}, r"input 'input_ids': -1 at row 1, position 1; allowed 0\.\.14"),
        ({"input_ids": [[2, -100]]}, r"input 'input_ids': -100 at row 0, position 1; allowed 0\.\.14"),
        ({"input_ids": [[15, 2]]}, r"input 'input_ids': 15 at row 0, position 0; allowed 0\.\.14"),
        (
            {"input_ids": [[2]], "attention_mask": [[2]]},
            r"input 'attention_mask': 2 at row 0, position 0; allowed 0\.\.1",
        ),
        (
            {"input_id": IDS, "foo": IDS},
            r"inputs: missing input_ids:int64\[batch,tokens<=16\].*; unknown foo, input_id;",
        ),
        ({}, r"missing input_ids:int64\[batch,tokens<=16\]; expected input_ids:int64\[batch,tokens<=16\], att"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_limit(model: Model, feeds: dict[str, Any], message: str) -> None:
    with pytest.raises(TxExportError, match=message):
        model.run_arrays(feeds)


@pytest.fixture(scope="module")
def doubling(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Twice a float32 input of three channels."""
    given = {"name": "x", "dtype": "float32", "dims": ["rows", "steps<=4", 3]}
    made = {"name": "y", "dtype": "float32", "dims": ["rows", "pieces", 3]}
    folder = make_artifact(tmp_path_factory.mktemp("floats") / "a", text=None, inputs=[given], outputs=[made])
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", "steps", 3]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", infos[:1], infos[1:])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), folder / "model.onnx")
    return Model(seal(folder), threads=1)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_float_inputs_take_any_float_and_integers(doubling: Model, dtype: str) -> None:
    x = np.arange(12).reshape(2, 2, 3)
    assert np.array_equal(doubling.run_arrays({"x": x.astype(dtype)})["y"], 2 * x)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.full((1, 1, 3), 1e300), "input 'x': float64 values don't fit into float32"),
        (np.full((1, 1, 3), 2**24 + 1), "input 'x': int64 values don't fit into float32"),
        (np.zeros((1, 1, 3), complex), "input 'x': dtype complex128 given; accepted: any float, integer or bool"),
        (np.zeros((1, 1, 4)), r"input 'x': a dim is 4 and must be 3: x:float32\[rows,steps<=4,3\]"),
        (np.zeros((0, 2, 3)), r"inputs: the batch is empty \(rows is 0\)"),
    ],
)
def test_floats_that_do_not_fit_are_refused(doubling: Model, value: np.ndarray, message: str) -> None:
    with pytest.raises(TxExportError, match=message):
        doubling.run_arrays({"x": value})


def test_an_artifact_without_a_tokenizer_takes_arrays_only_and_says_so(doubling: Model) -> None:
    with pytest.raises(TxExportError, match=r"has no tokenizer; it takes arrays \(Model\.run_arrays\), not text"):
        doubling(["good"])
