"""The grid of shapes and masks, and batches of text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from tx_export.errors import LoadError
from tx_export.spec import EagerModel
from tx_export.testing import eager_model, tiny_classifier
from tx_export.verify import default_lines, grid, split_lines, text_feeds

_DIMS = "[batch,tokens<=40]"


def encoder(
    *inputs: str, ids: str = f"input_ids:int64{_DIMS}{{0..9}}", mask: str = f"attention_mask:int64{_DIMS}"
) -> EagerModel:
    return eager_model(nn.Identity(), [ids, mask, *inputs], ["y:float32[batch,tokens]"])


def test_the_grid_is_batch_by_tokens_by_masks_with_the_maximum_in_one_row() -> None:
    found = {(case.shape, case.mask) for case in grid(encoder())}
    masks = ("full", "ragged", "left", "holed", "empty")
    expected = {((b, t), mask) for b in (1, 2, 5) for t in (2, 17) for mask in masks}
    expected |= {((b, 1), mask) for b in (1, 2, 5) for mask in ("full", "empty")}  # one position is real or not
    expected |= {((1, 40), mask) for mask in masks}
    assert found == expected


def test_the_maximum_is_1024_tokens_unless_more_is_asked_for() -> None:
    dims = "[batch,tokens<=4096]"
    model = encoder(ids=f"input_ids:int64{dims}{{0..9}}", mask=f"attention_mask:int64{dims}")
    assert max(case.shape[1] for case in grid(model)) == 1024
    assert max(case.shape[1] for case in grid(model, longest=4096)) == 4096


def test_each_kind_of_mask_is_what_it_says() -> None:
    for case in (case for case in grid(encoder()) if case.shape[1] > 1):
        mask, rows = case.feeds["attention_mask"], case.shape[0]
        real = mask.sum(axis=1)
        assert set(np.unique(mask)) <= {0, 1}
        if case.mask == "full":
            assert real.min() == case.shape[1]
        elif case.mask == "empty":
            assert sorted(real) == [0] + [case.shape[1]] * (rows - 1)
        elif case.mask == "holed":
            assert (real >= 1).all() and (real < case.shape[1]).all()
        else:
            steps = np.diff(mask, axis=1)  # ragged only falls, left only rises
            assert (steps <= 0).all() if case.mask == "ragged" else (steps >= 0).all()
            assert 1 <= real.min() < case.shape[1]
            assert rows == 1 or real.max() == case.shape[1]


def test_the_pad_id_stands_where_the_mask_is_zero_and_nowhere_else() -> None:
    model = replace(encoder(f"token_type_ids:int64{_DIMS}{{0..5}}"), pad_id=3)
    seen = set()
    for case in grid(model):
        ids, mask = case.feeds["input_ids"], case.feeds["attention_mask"]
        assert ((ids == 3) == (mask == 0)).all()
        seen |= set(np.unique(ids).tolist())
        assert case.feeds["token_type_ids"].max() <= 1
    assert seen == set(range(10))  # both ends of the range, and the pad id


def test_values_keep_to_their_range_and_dtype() -> None:
    model = encoder(
        "pixels:float32[batch,3]{-2..2}", "flags:bool[batch]", "age:int32[batch]{18..99}", "x:float16[batch,2]"
    )
    for case in grid(model):
        for spec in model.inputs:
            array = case.feeds[spec.name]
            assert array.dtype == spec.dtype
            assert spec.low is None or spec.high is None or (array.min() >= spec.low and array.max() <= spec.high)


def test_the_same_seed_gives_the_same_cases_and_another_seed_others() -> None:
    first, second, other = (grid(encoder(), seed=seed) for seed in (0, 0, 1))
    for name in ("input_ids", "attention_mask"):
        assert all((a.feeds[name] == b.feeds[name]).all() for a, b in zip(first, second, strict=True))
        assert any((a.feeds[name] != b.feeds[name]).any() for a, b in zip(first, other, strict=True))


def test_any_named_dims_are_sized_within_their_bounds_and_unlike_each_other() -> None:
    model = eager_model(nn.Identity(), ["a:float32[rows<=9,4]", "b:float32[columns<=30,rows<=12]"], ["y:float32[rows]"])
    sizes = [(case.feeds["a"].shape[0], case.feeds["b"].shape[0]) for case in grid(model)]
    assert {rows for rows, _ in sizes} == {1, 2, 9}
    assert {columns for _, columns in sizes} == {1, 2, 17, 30}
    assert (9, 30) in sizes
    assert any(rows != columns for rows, columns in sizes)
    assert all(case.feeds["b"].shape[1] == case.feeds["a"].shape[0] for case in grid(model))


def test_a_model_of_fixed_shape_has_one_case() -> None:
    assert [case.shape for case in grid(eager_model(nn.Identity(), ["x:float32[3,4]"], ["y:float32[3,4]"]))] == [(3, 4)]


def test_text_becomes_padded_batches_of_like_length_with_every_token_once() -> None:
    model = tiny_classifier()
    lines = default_lines()[:30]
    assert model.text is not None
    tokenizer = Tokenizer.from_str(model.text.tokenizer)
    expected = sorted(tuple(tokenizer.encode(line).ids) for line in lines)
    found, lengths = [], []
    for feeds in text_feeds(model, lines):
        ids, mask = feeds["input_ids"], feeds["attention_mask"]
        assert len(ids) <= 8
        assert mask.sum(axis=1).max() == ids.shape[1] <= 32
        assert (ids[mask == 0] == model.text.pad_id).all()
        lengths += mask.sum(axis=1).tolist()
        found += [tuple(row[real == 1].tolist()) for row, real in zip(ids, mask, strict=True)]
    assert lengths == sorted(lengths)
    # The tokenizer cuts at 32 and keeps the closing token.
    assert sorted(found) == sorted(ids if len(ids) <= 32 else (*ids[:31], ids[-1]) for ids in expected)


def test_text_runs_row_by_row_where_there_is_no_mask() -> None:
    model = tiny_classifier()
    assert [
        len(feeds["input_ids"]) for feeds in text_feeds(replace(model, inputs=model.inputs[:1]), ["one", "two more"])
    ] == [1, 1]


def test_text_for_a_model_that_takes_something_else_is_refused() -> None:
    model = tiny_classifier()
    extra = encoder("pixels:float32[batch,3]").inputs[2:]
    with pytest.raises(LoadError, match=r"text gives input_ids, .* but the model also takes pixels"):
        text_feeds(replace(model, inputs=(*model.inputs, *extra)), ["one"])
    with pytest.raises(LoadError, match=r"tiny: there is no tokenizer"):
        text_feeds(replace(model, text=None), ["one"])
    assert model.text is not None
    with pytest.raises(LoadError, match=r"tiny: the tokenizer raised Exception"):
        text_feeds(replace(model, text=replace(model.text, tokenizer="{}")), ["one"])


def test_every_fifth_line_judges_and_the_others_choose() -> None:
    split = split_lines([f" {number}\n" for number in range(1, 13)] + ["  ", ""])
    assert split.judging == ("5", "10")
    assert split.choosing == tuple(str(number) for number in (1, 2, 3, 4, 6, 7, 8, 9, 11, 12))
    with pytest.raises(LoadError, match=r"calibration text: 4 lines; it takes at least 5"):
        split_lines(["a", "b", "c", "d"])


def test_the_sentences_that_ship_are_two_hundred_of_very_different_lengths() -> None:
    lines = default_lines()
    assert len(lines) == len(set(lines)) == 200
    judging = split_lines(lines).judging
    for part in (lines, judging):
        words = sorted(len(line.split()) for line in part)
        assert words[0] <= 4 and words[-1] >= 40
    assert max(len(line.split()) for line in lines) <= 60
    assert any(not line.isascii() for line in judging)
    assert any(character.isdigit() for line in judging for character in line)


def test_a_case_says_what_it_is() -> None:
    case = next(case for case in grid(encoder()) if case.shape == (2, 17) and case.mask == "ragged")
    assert str(case) == "2x17 ragged mask"
    assert case.to_json() == {"batch": 2, "tokens": 17, "mask": "ragged"}
    assert torch.from_numpy(case.feeds["input_ids"]).shape == (2, 17)
