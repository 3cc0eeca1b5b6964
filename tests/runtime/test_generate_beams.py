"""Beam search on graphs of tiny checkpoints, against transformers' own; and that of one prompt, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tx_export.runtime_generate import Options, Rules, _Search

from .generators import continued, prompts, tiny

_NEW = 16


@pytest.mark.parametrize("family", ["llama", "bart", "marian", "t5"])
def test_4_beams_are_those_of_transformers(family: str) -> None:
    model = tiny(family)
    generator, rows = model.generator(), prompts(6, 2, 20)
    for asked, theirs in (
        ({}, {}),
        ({"length_penalty": 2.0}, {"length_penalty": 2.0}),
        ({"length_penalty": -1.0, "early_stopping": True}, {"length_penalty": -1.0, "early_stopping": True}),
        ({"no_repeat_ngram": 2, "min_new_tokens": 5}, {"no_repeat_ngram_size": 2, "min_new_tokens": 5}),
    ):
        options: dict[str, Any] = {"max_new_tokens": _NEW, "beams": 4, **asked}
        expected = continued(model.theirs, rows, _NEW, num_beams=4, **theirs)
        assert [generator.generate([row], Options(**options))[0] for row in rows] == expected
        assert generator.generate(rows, Options(**options)) == expected  # together, padded


@pytest.mark.parametrize("family", ["bart", "marian", "t5"])
def test_greedy_tokens_behind_an_encoder_are_those_of_transformers(family: str) -> None:
    model = tiny(family)
    generator, rows = model.generator(), prompts(20, 1, 30)
    found = [generator.generate([row], Options(max_new_tokens=32))[0] for row in rows]
    assert found == continued(model.theirs, rows, 32)


def test_rows_whose_beams_end_at_different_steps_are_searched_as_each_alone() -> None:
    generator, rows = tiny("llama").generator(eos=list(range(2, 60))), prompts(5, 1, 20)
    options = Options(max_new_tokens=20, beams=3, early_stopping=True)
    together = generator.generate(rows, options)
    assert together == [generator.generate([row], options)[0] for row in rows]
    assert len({len(row) for row in together}) > 1


def test_a_search_keeps_what_ended_with_the_score_that_its_length_divides() -> None:
    """Two beams over four tokens, of which 0 ends; by hand: behind 1 the end has 0.5, behind 2 it has 0.9."""
    rules = Rules(Options(beams=2, max_new_tokens=5, early_stopping=True), 5, frozenset({0}))
    search = _Search([3], rules)
    search.advance(np.log([[0.05, 0.5, 0.4, 0.05]]))
    assert (search.tokens.tolist(), search.done) == ([1, 2], False)
    search.advance(np.log([[0.5, 0.1, 0.1, 0.3], [0.9, 0.04, 0.03, 0.03]]))
    # 0.4 * 0.9 and 0.5 * 0.5 are the two likeliest, and both are ends.
    assert (search.done, search.best()) == (True, [2])
    assert [score for score, _ in search._finished] == pytest.approx([np.log(0.36) / 2, np.log(0.25) / 2])
