"""From logits to a token: what is asked for, what may be chosen, and how likely, against transformers' processors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from tx_export.runtime_generate import LimitError, Options, Rules

_VOCABULARY, _END, _LIMIT = 60, 2, 9
_IDS = [5, 9, 7, 5, 9, 7, 5, 8, 5, 9]  # of which the last three are new
_NEW = 3

Given = dict[str, Any]


def _logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 4, _VOCABULARY).astype(np.float32)


def _rules(**given: Any) -> Rules:
    """`given` are options, or what a checkpoint asks for."""
    names = {field.name for field in dataclasses.fields(Rules)} - {"options", "limit", "eos"}
    own = {name: value for name, value in given.items() if name in names}
    options = Options(**{name: value for name, value in given.items() if name not in names})
    return Rules(options, _LIMIT, frozenset({_END}), **own)


def _probabilities(rules: Rules, ids: list[int], new: int, seed: int) -> np.ndarray:
    tokens, found = rules.likely(rules.scores(_logits(seed), ids, new))
    everything = np.zeros(_VOCABULARY)
    everything[tokens] = found
    return everything


def _processors(given: Given, prompt: int) -> list[Any]:
    """As transformers' generate makes them of the same wishes, in its order."""
    made: Given = {
        "repetition_penalty": theirs.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram": theirs.NoRepeatNGramLogitsProcessor,
        "min_new_tokens": lambda count: theirs.MinNewTokensLengthLogitsProcessor(prompt, count, _END),
        "forced_bos": theirs.ForcedBOSTokenLogitsProcessor,
        "forced_eos": lambda token: theirs.ForcedEOSTokenLogitsProcessor(prompt + _LIMIT, token),
        "suppressed": lambda tokens: theirs.SuppressTokensLogitsProcessor(list(tokens)),
        "temperature": theirs.TemperatureLogitsWarper,
        "top_k": theirs.TopKLogitsWarper,
        "top_p": theirs.TopPLogitsWarper,
        "min_p": theirs.MinPLogitsWarper,
    }
    return [made[name](given[name]) for name in made if name in given]


def _processed(given: Given, ids: list[int], new: int, seed: int) -> torch.Tensor:
    scores = torch.from_numpy(_logits(seed))[None]
    for processor in _processors(given, len(ids) - new):
        scores = processor(torch.tensor([ids]), scores)
    return scores[0]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7},
        {"no_repeat_ngram": 1},
        {"no_repeat_ngram": 2},
        {"no_repeat_ngram": 3},
        {"no_repeat_ngram": 30},
        {"min_new_tokens": 4},
        {"min_new_tokens": 3},
        {"suppressed": (4, 5, 11)},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 1000},
        {"top_p": 0.9},
        {"top_p": 0.5, "temperature": 4.0},
        {"top_p": 1e-9},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"min_p": 0.02, "top_p": 0.8, "top_k": 20, "temperature": 3.0},
        {"repetition_penalty": 1.3, "no_repeat_ngram": 2, "min_new_tokens": 5, "suppressed": (8,), "top_p": 0.7},
    ],
)
def test_what_may_be_drawn_is_as_likely_as_transformers_has_it(given: Given) -> None:
    """Within 1e-6; theirs is float32, of which one step is 6e-8."""
    given = {"temperature": 1.0, **given}
    for seed in range(5):
        expected = _processed(given, _IDS, _NEW, seed).softmax(-1).numpy()
        assert np.abs(_probabilities(_rules(**given), _IDS, _NEW, seed) - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("ids", "new", "token"), [([4], 0, 7), (_IDS, _NEW, None), (_IDS, _LIMIT - 1, 5), (_IDS, _LIMIT - 2, None)]
)
def test_the_first_token_behind_a_start_and_the_last_one_are_forced(
    ids: list[int], new: int, token: int | None
) -> None:
    given = {"forced_bos": 7, "forced_eos": 5}
    scores = _rules(**given).scores(_logits(), ids, new)
    assert np.array_equal(scores.astype(np.float32), _processed(given, ids, new, 0).numpy())
    assert token is None or scores.argmax() == token


def test_what_is_suppressed_may_be_forced() -> None:
    assert _rules(forced_eos=5, suppressed=(5,)).scores(_logits(), _IDS, _LIMIT - 1).argmax() == 5


def test_draws_are_as_frequent_as_they_are_likely() -> None:
    """Pearson's statistic of n cells has mean n - 1 and variance 2 (n - 1); five deviations above it are allowed."""
    rules = _rules(temperature=4.0, top_k=25, top_p=0.95)
    scores, random, draws = rules.scores(_logits(), _IDS, _NEW), np.random.default_rng(3), 20_000
    counts = np.bincount([rules.choose(scores, random) for _ in range(draws)], minlength=_VOCABULARY)
    expected = _probabilities(rules, _IDS, _NEW, 0) * draws
    drawn = expected > 0
    assert counts[~drawn].sum() == 0
    cells = int(drawn.sum()) - 1
    assert ((counts - expected)[drawn] ** 2 / expected[drawn]).sum() < cells + 5 * (2 * cells) ** 0.5


def test_large_logits_and_small_temperatures_stay_finite() -> None:
    for temperature in (1e-300, 1e-3, 1e300):
        rules = _rules(temperature=temperature)
        tokens, found = rules.likely(np.array([3e38, -3e38, 1e38, 2.9e38]))
        assert np.isfinite(found).all() and abs(found.sum() - 1) < 1e-12 and 0 in tokens


def test_when_no_token_is_left_that_is_an_error() -> None:
    rules = _rules(suppressed=tuple(range(_VOCABULARY)))
    with pytest.raises(LimitError, match="no token is left to choose: each is suppressed or repeats an n-gram"):
        rules.choose(rules.scores(_logits(), _IDS, _NEW), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: 0 is not a whole number of at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: 2.5 is not a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens: True is not a whole number"),
        ({"temperature": -0.1}, "temperature: -0.1 is not a number of at least 0"),
        ({"temperature": float("nan")}, "temperature: nan is not a number of at least 0"),
        ({"temperature": float("inf")}, "temperature: inf is not a number of at least 0"),
        ({"temperature": "hot"}, "temperature: 'hot' is not a number of at least 0"),
        ({"top_k": -1}, "top_k: -1 is not a whole number of at least 0"),
        ({"top_p": 0.0}, "top_p: 0.0 is not a number above 0 and up to 1"),
        ({"top_p": 1.1}, "top_p: 1.1 is not a number above 0 and up to 1"),
        ({"min_p": 1.5}, "min_p: 1.5 is not a number from 0 to 1"),
        ({"min_p": -0.5}, "min_p: -0.5 is not a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty: 0 is not a number above 0"),
        ({"length_penalty": 1e6}, "length_penalty: 1000000.0 is not a number from -100 to 100"),
        ({"seed": -1}, "seed: -1 is not a whole number of at least 0"),
        ({"beams": 0}, "beams: 0 is not a whole number of at least 1"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram: -1 is not a whole number of at least 0"),
        ({"beams": 4, "temperature": 0.5}, "4 beams keep the likeliest; they don't go with a temperature above 0"),
        ({"top_p": 0.9}, "top_k, top_p and min_p need a temperature above 0"),
    ],
)
def test_an_option_out_of_its_range_is_named(given: Given, message: str) -> None:
    with pytest.raises(LimitError, match=message):
        Options(**given)
