"""What bench times of a model that generates; references are the plain module and what each session was given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tx_export._bench_prompt import read_prompt, reading_module, with_empty_cache
from tx_export.models.lm import Lm
from tx_export.models.seq2seq import Seq2seq
from tx_export.spec import EagerModel, ModelSpec
from tx_export.testing import eager_model

_SMALL: dict[str, Any] = {"vocab_size": 99, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16}


class _Session:
    """Gives each output the sum of all inputs that it was run with, which it keeps."""

    def __init__(self, inputs: Mapping[str, tuple[str, list[Any]]], outputs: Sequence[str]) -> None:
        self._inputs = [SimpleNamespace(name=name, type=kind, shape=shape) for name, (kind, shape) in inputs.items()]
        self._outputs = [SimpleNamespace(name=name) for name in outputs]
        self.given: Mapping[str, np.ndarray] = {}

    def get_inputs(self) -> list[SimpleNamespace]:
        return self._inputs

    def get_outputs(self) -> list[SimpleNamespace]:
        return self._outputs

    def run(self, names: Sequence[str], given: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        self.given = given
        return [np.full(1, sum(array.sum() for array in given.values())) for _ in names]


def _ids(batch: int, tokens: int) -> dict[str, np.ndarray]:
    return {
        "input_ids": np.arange(batch * tokens).reshape(batch, tokens) % 99,
        "attention_mask": np.ones((batch, tokens), np.int64),
    }


def _model(spec: ModelSpec) -> EagerModel:
    torch.manual_seed(0)
    plain = eager_model(spec.build(), spec.inputs(), spec.outputs(), task=spec.task)
    return dataclasses.replace(plain, cache=spec.cache())


def test_a_prompt_is_read_from_an_empty_cache_in_the_graphs_precision_up_to_its_last_logits() -> None:
    ids, past = ("tensor(int64)", ["batch", "tokens"]), ("tensor(float16)", ["batch", 3, "past", 8])
    names: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": ids,
        "logits_at": ("tensor(int64)", ["kept"]),
        "past.0.key": past,
    }
    session = _Session(names, ["logits", "present.0.key"])
    given = with_empty_cache([session], _ids(2, 7))
    assert given["logits_at"].tolist() == [6]
    assert given["past.0.key"].shape == (2, 3, 0, 8)
    assert given["past.0.key"].dtype.name == "float16"
    assert read_prompt([session], given)["logits"].tolist() == [_ids(2, 7)["input_ids"].sum() + 14 + 6]
    assert session.given.keys() == names.keys()


def test_a_decoder_takes_its_first_step_behind_what_the_encoder_made_of_the_prompt() -> None:
    ids = ("tensor(int64)", ["batch", "tokens"])
    encoder = _Session({"input_ids": ids, "attention_mask": ids}, ["cross.0.key"])
    steps = {"decoder_input_ids": ids, "decoder_attention_mask": ids, "attention_mask": ids}
    cross: Any = ("tensor(float)", ["batch", 2, "tokens", 8])
    decoder = _Session({**steps, "logits_at": ("tensor(int64)", ["kept"]), "cross.0.key": cross}, ["logits"])
    feeds = {**_ids(2, 7), "decoder_input_ids": np.full((2, 7), 5)}
    read_prompt([encoder, decoder], with_empty_cache([encoder, decoder], feeds))
    assert decoder.given["decoder_input_ids"].tolist() == [[5], [5]]
    assert decoder.given["decoder_attention_mask"].tolist() == [[1], [1]]
    assert decoder.given["logits_at"].tolist() == [0]
    assert decoder.given["cross.0.key"].tolist() == [_ids(2, 7)["input_ids"].sum() + 14]


@torch.no_grad()
def test_eager_does_as_much_of_a_prompt_as_the_artifact() -> None:
    decoder, feeds = _model(Lm(**_SMALL)), _ids(2, 7)
    module, inputs = reading_module(decoder, feeds)
    logits = module(*inputs)[0]
    whole = decoder.module(*(torch.from_numpy(array) for array in feeds.values()))
    assert logits.shape == (2, 1, 99)
    assert (logits[:, 0] - whole[:, -1]).abs().max() <= 1e-5  # the order of sums
    module, inputs = reading_module(_model(Seq2seq(**_SMALL)), {**feeds, "decoder_input_ids": np.full((2, 7), 5)})
    assert module(*inputs).shape == (2, 1, 99)
