"""Where greedy text of a graph leaves eager's; the reference is a generation token by token with that graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from tx_export._continuations import continued, divergence
from tx_export._judging_text import default_lines, text_feeds
from tx_export._reference import Runner, eager_runner
from tx_export.load import load
from tx_export.spec import EagerModel

_LINES = default_lines()[:12]


@pytest.fixture(scope="module", params=["lm", "seq2seq"])
def model(request: pytest.FixtureRequest) -> EagerModel:
    return load(request.param, weights="random:3", settings={"vocab_size": "8000"})


_NOISE = np.random.default_rng(0).normal(0, 3, 8000).astype(np.float32)


def _noisy(model: EagerModel) -> Runner:
    """Eager with logits that are wrong by a fixed amount for each token of the vocabulary."""
    run = eager_runner(model)
    return lambda feeds: {"logits": run(feeds)["logits"] + _NOISE}


def _greedy(model: EagerModel, run: Runner, feeds: Mapping[str, np.ndarray], new: int) -> np.ndarray:
    name = "decoder_input_ids" if "decoder_input_ids" in feeds else "input_ids"
    feeds = dict(feeds)
    for _ in range(new):
        token = run(feeds)["logits"][:, -1].argmax(-1)[:, None]
        feeds[name] = np.concatenate([feeds[name], token], axis=1)
        if name == "input_ids":
            feeds["attention_mask"] = np.ones_like(feeds[name])
    return feeds[name][:, -new:]


def test_eager_itself_leaves_nothing(model: EagerModel) -> None:
    found = divergence(model, eager_runner(model), text_feeds(model, _LINES))
    assert (found["prompts"], found["tokens"], found["first"]) == (found["prompts"], 32, [])
    assert found["prompts"] >= 4


def test_the_first_token_that_differs_is_that_of_a_generation_and_the_margin_is_eagers(model: EagerModel) -> None:
    texts, run = text_feeds(model, _LINES), _noisy(model)
    found = divergence(model, run, texts)
    assert found["first"]
    if model.cache is not None and model.cache.cross:
        begun = {**texts[-1], "decoder_input_ids": texts[-1]["decoder_input_ids"][:, :1]}
    else:
        rows = [
            row[mask != 0][:8]
            for feeds in texts
            for row, mask in zip(feeds["input_ids"], feeds["attention_mask"], strict=True)
        ]
        ids = np.stack([row for row in rows if len(row) == 8][:8])
        begun = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    eager, other = (_greedy(model, each, begun, 32) for each in (eager_runner(model), run))
    differ = {row: int(np.flatnonzero(line)[0]) + 1 for row, line in enumerate(eager != other) if line.any()}
    assert {item["prompt"]: item["token"] for item in found["first"]} == differ
    # What is taken instead had to gain more than the margin from the noise.
    assert all(0 < item["margin"] < _NOISE.max() - _NOISE.min() for item in found["first"])


def test_the_decoder_input_of_text_is_what_eager_says() -> None:
    model = load("seq2seq", weights="random:3", settings={"vocab_size": "8000"})
    feeds = {key: value for key, value in text_feeds(model, _LINES)[0].items() if key != "decoder_input_ids"}
    ids = continued(model, feeds)
    assert ids.shape[1] == 12 and (ids[:, 0] == 2).all()
    start = {**feeds, "decoder_input_ids": ids[:, :1]}
    assert np.array_equal(ids[:, 1:], _greedy(model, eager_runner(model), start, 11))
