"""Cases of the cache of keys and values, and of continuations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tx_export.compiler import BuildOptions, build
from tx_export.runtime import Model, read_manifest
from tx_export.runtime_generate import Generator, LimitError, Options, names, read

Once = Callable[[str, Callable[[Path], object]], Path]
Arrays = dict[str, np.ndarray]

_CONFIG: Any = transformers.LlamaConfig(
    vocab_size=300,
    hidden_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)


@pytest.fixture(scope="session")
def dec_checkpoint(once: Once) -> Path:
    """A small decoder, with weights so large that no activation is nearly linear."""

    def make(folder: Path) -> None:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(_CONFIG)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
        model.save_pretrained(folder)

    return once("dec-checkpoint", make)


@pytest.fixture(scope="session")
def dec_artifact(once: Once, dec_checkpoint: Path) -> Path:
    """That decoder in fp32."""
    source = str(dec_checkpoint)
    return once("dec-fp32", lambda folder: build(BuildOptions(source=source, output=folder, quantize="none")))


@pytest.fixture(scope="session")
def dec_int8(once: Once, dec_checkpoint: Path) -> Path:
    """That decoder as dynamic_int8."""
    source = str(dec_checkpoint)
    return once("dec-int8", lambda folder: build(BuildOptions(source=source, output=folder, budget="sqnr_db=5")))


class _Decoder:
    """An artifact, its graph and eager beside it."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.model = Model(folder, threads=1)
        self.generation: dict[str, Any] = {**read_manifest(folder)["generation"], "eos": []}
        self._sessions = self.model._sessions.by_name(1)
        self._eager: Any = transformers.LlamaForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
        self.empty = {
            name: np.zeros((1, 2, 0, 24), np.float32) for name in names(self.generation["cache"], "past")
        }  # [batch, heads, past, head_dim]

    def generator(self) -> Generator:
        return Generator(self._sessions, self.generation)

    def read(self, ids: Any, mask: np.ndarray, past: Arrays) -> tuple[np.ndarray, Arrays]:
        session = self._sessions["model"]
        outputs = [item.name for item in session.get_outputs()]
        return read(
            lambda feeds: dict(zip(outputs, session.run(outputs, dict(feeds)), strict=True)), np.array(ids), mask, past
        )

    def eager(self, ids: Any) -> np.ndarray:
        """Logits [batch, tokens, vocabulary] without a cache."""
        with torch.no_grad():
            return np.asarray(self._eager.eval()(torch.tensor(ids)).logits)


@pytest.fixture(scope="module")
def decoder(dec_artifact: Path, dec_checkpoint: Path) -> _Decoder:
    return _Decoder(dec_artifact, dec_checkpoint)


def _rows(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, 300, length).tolist() for length in lengths]


def _batch(past: Arrays, rows: int) -> Arrays:
    return {name: np.repeat(array, rows, axis=0) for name, array in past.items()}


def test_b163_reordered_beams_go_on_from_their_own_past(decoder: _Decoder) -> None:
    prefixes, order = np.array(_rows(5, 5, 5)), [2, 0, 0]
    _, past = decoder.read(prefixes, np.ones((3, 5), np.int64), _batch(decoder.empty, 3))
    past, whole = {name: array[order] for name, array in past.items()}, prefixes[order]
    for step in range(4):
        whole = np.concatenate([whole, np.array(_rows(4, 4, 4))[:, step : step + 1]], axis=1)
        found, past = decoder.read(whole[:, -1:], np.ones(whole.shape, np.int64), past)
        expected = decoder.eager(whole)[:, -1]
        # fp32 fidelity: 1e-4, or 3e-6 of the largest value.
        assert np.abs(found[:, 0] - expected).max() <= max(1e-4, 3e-6 * np.abs(expected).max())


def test_b163_a_cache_that_is_written_in_place_is_reordered_too(decoder: _Decoder) -> None:
    prefixes, order = _rows(5, 5, 5), np.array([2, 0, 0])
    generator = decoder.generator()
    rows, rules = generator._begin(prefixes, Options(max_new_tokens=5))
    batch = generator._open(prefixes, rows, rules)
    batch.read(np.array(prefixes))
    batch.select(order)
    whole = np.array(prefixes)[order]
    for step in range(4):
        whole = np.concatenate([whole, np.array(_rows(4, 4, 4))[:, step : step + 1]], axis=1)
        expected = decoder.eager(whole)[:, -1]
        assert np.abs(batch.read(whole[:, -1:]) - expected).max() <= max(1e-4, 3e-6 * np.abs(expected).max())


@pytest.mark.parametrize("length", [1, 6, 7])
def test_b165_a_mask_covers_the_past_and_the_new_tokens(decoder: _Decoder, length: int) -> None:
    (ids,) = _rows(6)
    _, past = decoder.read([ids[:5]], np.ones((1, 5), np.int64), decoder.empty)
    mask = np.ones((1, length), np.int64)
    if length == 6:
        expected = decoder.eager([ids])[:, -1]
        found = decoder.read([ids[5:]], mask, past)[0][:, 0]
        assert np.abs(found - expected).max() <= max(1e-4, 3e-6 * np.abs(expected).max())
        return
    with pytest.raises(LimitError, match=rf"attention_mask: covers {length} positions, not past 5 \+ new 1 = 6"):
        decoder.read([ids[5:]], mask, past)


def test_b167_prompts_of_different_length_are_continued_as_each_alone(decoder: _Decoder) -> None:
    prompts, options = _rows(2, 6, 11), Options(max_new_tokens=10)
    together = decoder.generator().generate(prompts, options)
    for prompt, found in zip(prompts, together, strict=True):
        assert decoder.generator().generate([prompt], options) == [found]
        whole = list(prompt)
        for _ in range(10):
            whole.append(int(decoder.eager([whole])[0, -1].argmax()))
        assert found == whole[len(prompt) :]


def test_b168_equal_rows_of_a_quantized_decoder_are_equal_and_as_the_row_alone(
    dec_int8: Path, dec_checkpoint: Path
) -> None:
    decoder = _Decoder(dec_int8, dec_checkpoint)
    (ids,) = _rows(9)
    mask, options = np.ones((1, 9), np.int64), Options(max_new_tokens=10)
    four, _ = decoder.read([ids] * 4, np.repeat(mask, 4, axis=0), _batch(decoder.empty, 4))
    alone, _ = decoder.read([ids], mask, decoder.empty)
    assert all(np.array_equal(four[0], row) for row in four[1:])
    # Equal rows have the scales of activations that one of them has.
    assert np.array_equal(four[:1], alone)
    rows = decoder.generator().generate([ids] * 4, options)
    assert rows == [decoder.generator().generate([ids], options)[0]] * 4
