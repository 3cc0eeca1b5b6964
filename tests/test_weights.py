"""The shipped weights: small, complete, and right on plain sentences."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from tx_export.models.classifier import Classifier

_FOLDER = Path(str(importlib.resources.files("tx_export.models.weights")))
_WEIGHTS, _TOKENIZER = _FOLDER / "classifier-small.safetensors", _FOLDER / "classifier-small.tokenizer.json"


@pytest.fixture(scope="module")
def spec() -> Classifier:
    with safe_open(_WEIGHTS, "pt") as weights:
        config = json.loads(weights.metadata()["config"])
    return Classifier(**(config | {"labels": tuple(config["labels"])}))


def _probabilities(spec: Classifier, texts: list[str]) -> Tensor:
    """[texts, labels]; each text runs alone."""
    module, tokenizer = spec.build().eval(), Tokenizer.from_file(str(_TOKENIZER))
    module.load_state_dict(safetensors.torch.load_file(_WEIGHTS))
    rows = [torch.tensor([tokenizer.encode(text).ids]) for text in texts]
    with torch.inference_mode():
        return torch.cat([module(ids, torch.ones_like(ids)).softmax(dim=-1) for ids in rows])


def test_the_header_describes_the_small_classifier(spec: Classifier) -> None:
    assert {name: getattr(spec, name) for name in Classifier.sizes["small"]} == Classifier.sizes["small"]
    assert spec.labels == ("negative", "positive")
    assert spec.max_length == 512


def test_weights_and_tokenizer_are_under_ten_megabytes() -> None:
    assert _WEIGHTS.stat().st_size + _TOKENIZER.stat().st_size < 10e6


def test_the_tokenizer_has_as_many_entries_as_the_model_and_no_word_is_lost(spec: Classifier) -> None:
    tokenizer = Tokenizer.from_file(str(_TOKENIZER))
    assert tokenizer.get_vocab_size() == spec.vocab_size
    assert [tokenizer.id_to_token(i) for i in range(4)] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    encoding = tokenizer.encode("A Complete WASTE of time, naïve unpronounceableness!")
    assert (encoding.tokens[0], encoding.tokens[-1], "[UNK]" in encoding.tokens) == ("[CLS]", "[SEP]", False)


def test_plain_praise_is_positive_and_plain_blame_negative_by_a_clear_margin(spec: Classifier) -> None:
    praise = ["what a wonderful film", "I love this product, it works great", "an absolute masterpiece"]
    blame = ["a complete waste of time", "the worst customer support ever", "boring and predictable"]
    # 0.75 leaves each logit a margin of ln 3 for what lower precisions do to it.
    assert (_probabilities(spec, praise)[:, 1] > 0.75).all()
    assert (_probabilities(spec, blame)[:, 0] > 0.75).all()
