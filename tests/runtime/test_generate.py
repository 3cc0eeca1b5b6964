"""Rows of ids continued on graphs of tiny checkpoints, against transformers' own generate."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from tx_export import runtime_generate
from tx_export.runtime_generate import Generator, LimitError, Options

from .generators import END, VOCABULARY, Tiny, continued, prompts, tiny

_TEN = Options(max_new_tokens=10)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_greedy_tokens_are_those_of_transformers_over_64_steps_on_20_prompts(family: str) -> None:
    model = tiny(family)
    generator, rows, apart = model.generator(), prompts(20, 1, 40), []
    for prompt, expected in zip(rows, continued(model.theirs, rows, 64), strict=True):
        (found,) = generator.generate([prompt], Options(max_new_tokens=64))
        apart += [_margin(model, prompt, found, expected)] if found != expected else []
    assert not apart, f"tokens differ by a margin in the logits of {apart}"


def _margin(model: Tiny, prompt: list[int], found: list[int], expected: list[int]) -> float:
    """By how much the reference prefers its own token to ours where they part."""
    pairs = list(zip([*found, END], [*expected, END], strict=False))
    place = next(place for place, (ours, theirs) in enumerate(pairs) if ours != theirs)
    with torch.no_grad():
        logits = model.theirs(torch.tensor([prompt + expected[:place]])).logits[0, -1]
    ours, theirs = pairs[place]
    return float(logits[theirs] - logits[ours])


@pytest.mark.parametrize(("family", "ops"), [("llama", "fused"), ("llama", "standard"), ("marian", "fused")])
def test_rows_of_a_ragged_batch_are_continued_as_each_alone(family: str, ops: Any) -> None:
    generator = tiny(family, ops).generator(eos=[END, *range(20, 40)])  # so that rows end at different steps
    rows = prompts(7, 1, 30)
    options = Options(max_new_tokens=30)
    together = generator.generate(rows, options)
    assert together == [generator.generate([row], options)[0] for row in rows]
    assert len({len(row) for row in together}) > 1


def test_a_graph_that_keeps_no_room_in_its_cache_gives_the_same_tokens() -> None:
    model, rows = tiny("llama", "standard"), prompts(4, 1, 12)
    cache = {**model.generation["cache"], "shared": False}
    growing, shared = model.generator(cache=cache), tiny("llama").generator()
    for options in (_TEN, Options(max_new_tokens=10, beams=3)):
        assert growing.generate(rows, options) == shared.generate(rows, options)


def test_a_prompt_that_begins_with_what_is_in_the_cache_is_read_from_there_on(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    whole = runtime_generate._Batch.read

    def counted(self: Any, ids: np.ndarray) -> np.ndarray:
        read.append(ids.shape[1])
        return whole(self, ids)

    monkeypatch.setattr(runtime_generate._Batch, "read", counted)
    for shared in (True, False):
        model = tiny("llama", "fused" if shared else "standard")
        generator = model.generator(eos=[], cache={**model.generation["cache"], "shared": shared})
        first = prompts(1, 9, 9)[0]
        second = [*first, *generator.generate([first], _TEN)[0], 50, 60, 70]
        read.clear()
        found = generator.generate([second], _TEN)
        assert read == [4, 1]  # the last token of the answer had not been read; what follows is bound already
        assert found == model.generator(eos=[]).generate([second], _TEN)
        read.clear()
        assert generator.generate([second], _TEN) == found
        assert read[0] == len(second)  # what is held goes on behind it


def test_the_cache_has_its_whole_size_before_the_first_step_and_nothing_is_written_behind_it() -> None:
    generator = tiny("llama").generator(eos=[])
    prompt, new, behind = prompts(1, 20, 20)[0], 30, 100
    generator.generate([prompt], Options(max_new_tokens=new))
    kept: Any = generator._kept
    size = kept.flat.size
    assert size == 2 * (len(prompt) + new) * 16 * 4  # heads, positions, channels; keys and values of two layers
    wide = np.full(size + behind, 7, np.float32)
    kept.flat, kept.held = wide[:size], ()
    generator.generate([prompt], Options(max_new_tokens=new))
    again: Any = generator._kept
    assert again.flat.base is wide
    assert (wide[size:] == 7).all() and (wide[:size] != 7).any()


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_long_prompts_are_read_in_pieces_and_give_the_same_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, sizes = [], []
    run = runtime_generate._Batch._run

    def noted(batch: Any) -> np.ndarray:
        sizes.append(batch._ids.shape)
        found.append(run(batch))
        return found[-1]

    monkeypatch.setattr(runtime_generate._Batch, "_run", noted)
    generator, rows, logits = tiny(family).generator(eos=[]), prompts(3, 5, 23), {}
    for piece in (1000, 7):
        monkeypatch.setattr(runtime_generate, "_PIECE", piece)
        sizes.clear()
        assert all(len(row) == 8 for row in generator.generate(rows, Options(max_new_tokens=8)))
        logits[piece] = found[-1].copy()
        assert all(size[0] * size[1] <= max(piece, len(rows)) for size in sizes)
    # The same numbers, summed in another order.
    assert np.abs(logits[7] - logits[1000]).max() < 1e-5 * np.abs(logits[7]).max()


def test_a_cache_far_larger_than_the_need_is_given_back() -> None:
    generator = tiny("llama").generator()
    generator.generate(prompts(8, 40, 40), Options(max_new_tokens=80))
    generator.generate(prompts(1, 3, 3), Options(max_new_tokens=5))
    kept: Any = generator._kept
    assert kept.flat.nbytes == 4 * 2 * 8 * 16 * 4


def test_listening_ends_a_row_and_the_others_go_on() -> None:
    generator, rows = tiny("llama").generator(eos=[]), prompts(3, 2, 9)
    whole = generator.generate(rows, _TEN)
    heard: list[list[int]] = [[] for _ in rows]

    def listen(row: int, ids: list[int]) -> bool:
        heard[row] += ids
        return row == 1 and len(heard[row]) == 4

    assert generator.generate(rows, _TEN, listen) == heard == [whole[0], whole[1][:4], whole[2]]


def test_a_stream_may_be_left_at_any_token() -> None:
    generator, prompt = tiny("llama").generator(eos=[]), prompts(1, 5, 5)[0]
    whole = generator.generate([prompt], _TEN)[0]
    stream = generator.stream(prompt, _TEN)
    assert [next(stream) for _ in range(4)] == whole[:4]
    stream.close()  # type: ignore[attr-defined]
    assert list(generator.stream([*prompt, *whole[:4]], Options(max_new_tokens=6))) == whole[4:]


def test_draws_are_those_of_a_seed_and_a_row_whatever_stands_beside_it() -> None:
    generator, rows = tiny("llama").generator(eos=[]), prompts(3, 2, 9)
    options = Options(max_new_tokens=10, temperature=5.0, top_k=50, seed=3)
    together = generator.generate(rows, options)
    assert together == generator.generate(rows, options)
    assert together[0] == generator.generate(rows[:1], options)[0]
    assert together[1] == generator.generate([rows[2], rows[1]], options)[1]
    assert together[2] == generator.generate(rows[2:], options, numbers=[2])[0]
    assert together != generator.generate(rows, Options(max_new_tokens=10, temperature=5.0, top_k=50, seed=4))
    alike = generator.generate([rows[0]] * 2, options)
    assert alike[0] != alike[1]


def test_a_row_ends_before_a_stop_id_but_not_before_the_least_number_of_tokens() -> None:
    generator, prompt = tiny("llama").generator(eos=[]), prompts(1, 5, 5)[0]
    whole = generator.generate([prompt], _TEN)[0]
    stop = whole[3]
    first = whole.index(stop)
    assert generator.generate([prompt], Options(max_new_tokens=10, stop_ids=(stop,))) == [whole[:first]]
    longer = generator.generate([prompt], Options(max_new_tokens=10, stop_ids=(stop,), min_new_tokens=8))[0]
    assert len(longer) >= 8 and stop not in longer[:8]


def test_without_a_number_there_are_128_tokens_or_what_the_limit_leaves() -> None:
    model, prompt = tiny("llama"), prompts(1, 28, 28)[0]
    assert len(model.generator(eos=[]).generate([prompt], Options())[0]) == 128 - 28
    cache = {**model.generation["cache"], "max_length": 1000}
    assert model.generator(cache=cache)._begin([prompt], Options())[1].limit == 128


def test_two_threads_at_once_do_not_share_a_cache() -> None:
    generator, rows = tiny("llama").generator(eos=[]), prompts(2, 10, 10)
    expected, found = [generator.generate([row], _TEN) for row in rows], {}

    def run(row: int) -> None:
        found[row] = [generator.generate([rows[row]], _TEN) for _ in range(20)]

    threads = [threading.Thread(target=run, args=(row,)) for row in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answer == expected[row] for row in range(2) for answer in found[row])


def test_no_prompts_are_no_rows_and_an_empty_prompt_begins_with_the_first_token() -> None:
    generator = tiny("llama").generator()
    assert generator.generate([], _TEN) == generator.generate([], Options(beams=2)) == []
    assert generator.generate([[]], _TEN) == generator.generate([[1]], _TEN)


def _with_a_broken_token(token: int) -> Generator:
    """As the checkpoint, but the embedding of one token is not a number."""
    model = tiny("llama")
    graph = onnx.load_from_string(model.graphs["model"])
    table = next(weight for weight in graph.graph.initializer if tuple(weight.dims) == (VOCABULARY, 64))
    values = numpy_helper.to_array(table).copy()
    values[token] = np.nan
    table.CopyFrom(numpy_helper.from_array(values, table.name))
    return Tiny(model.theirs, {"model": graph.SerializeToString()}, model.generation).generator()


@pytest.mark.parametrize(
    "options", [_TEN, Options(temperature=1.0, max_new_tokens=10), Options(beams=2, max_new_tokens=10)]
)
def test_logits_that_are_not_finite_are_an_error_that_names_the_step(options: Options) -> None:
    prompt = prompts(1, 5, 5)[0]
    with pytest.raises(LimitError, match="the logits of step 0 are not finite"):
        _with_a_broken_token(prompt[2]).generate([prompt], options)


def test_logits_that_stop_being_finite_are_an_error_that_names_the_step() -> None:
    prompt = prompts(1, 5, 5)[0]
    whole = tiny("llama").generator().generate([prompt], _TEN)[0]
    broken = whole[2]
    with pytest.raises(LimitError, match=f"the logits of step {whole.index(broken) + 1} are not finite"):
        _with_a_broken_token(broken).generate([prompt], _TEN)


@pytest.mark.parametrize(
    ("rows", "options", "told", "message"),
    [
        ([[9], [9] * 120], _TEN, {}, "prompt 1: 120 tokens and 10 new ones are 130; the limit of this model is 128"),
        ([[9] * 128], Options(), {}, "prompt 0: 128 tokens and 1 new ones are 129; the limit of this model is 128"),
        ([[9], []], _TEN, {"bos": None}, "prompt 1: has no token, and this model names none to begin with"),
        ([[9, VOCABULARY]], _TEN, {}, "prompt 0: token id 300; the model takes 0..299"),
        ([[-1]], _TEN, {}, "prompt 0: token id -1; the model takes 0..299"),
        ([[9]], Options(stop_ids=(300,)), {}, "stop_ids: token id 300; the model takes 0..299"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_named(
    rows: list[list[int]], options: Options, told: dict[str, Any], message: str
) -> None:
    with pytest.raises(LimitError, match=message):
        tiny("llama").generator(**told).generate(rows, options)


def test_sources_are_checked_and_beams_are_not_listened_to() -> None:
    generator = tiny("marian").generator()
    for prompt, message in (([], "prompt 0: has no token"), ([-3], "prompt 0: token id -3 is below 0")):
        with pytest.raises(LimitError, match=message):
            generator.generate([prompt], _TEN)
    with pytest.raises(LimitError, match="generation names no token to start with behind a source"):
        tiny("marian").generator(start=None).generate([[9]], _TEN)
    with pytest.raises(LimitError, match="2 beams give nothing before the end"):
        generator.generate([[9]], Options(beams=2), lambda row, ids: False)
    with pytest.raises(LimitError, match="2 beams give nothing before the end"):
        generator.stream([9], Options(beams=2))
