"""Tokenizers, labels, and how long a text may be."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.spec import Dim, EagerModel
from tx_export.testing import tiny_bert_folder, tiny_tokenizer

_TINY = {"vocab_size": "128", "max_length": "32", "d_model": "16", "num_heads": "4", "d_ff": "32", "num_layers": "2"}


def _tokens(model: EagerModel) -> int | None:
    return next(dim.bound for dim in model.inputs[0].dims if isinstance(dim, Dim) and dim.name == "tokens")


def _edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    return tiny_bert_folder(tmp_path / "bert", "BertForSequenceClassification")


@pytest.mark.parametrize("limit", [1e30, 512])
def test_b206_a_tokenizer_limit_over_the_position_table_is_cut_with_a_notice(
    limit: float, classifier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B206."""
    _edit_json(classifier / "tokenizer_config.json", model_max_length=limit)
    model = load(str(classifier))
    assert model.text is not None and model.text.max_length == 32
    assert "the position table has 32: texts are cut at 32" in caplog.text


def test_the_limit_of_sentence_transformers_comes_before_the_tokenizers(tmp_path: Path) -> None:
    folder = tiny_bert_folder(tmp_path / "st", pooling=("mean",))
    _edit_json(folder / "sentence_bert_config.json", max_seq_length=9)
    model = load(str(folder))
    assert model.text is not None and model.text.max_length == 9
    assert _tokens(model) == 32  # arrays may use the whole table


def test_a_limit_by_hand_bounds_text_and_arrays(classifier: Path) -> None:
    model = load(str(classifier), max_length=12)
    assert model.text is not None and model.text.max_length == 12
    assert _tokens(model) == 12


@pytest.mark.parametrize("built_in", [True, False])
def test_a_limit_by_hand_over_the_table_is_refused_with_both_numbers(built_in: bool, classifier: Path) -> None:
    with pytest.raises(LoadError, match="max-length 33 is more than the 32 positions"):
        load(None if built_in else str(classifier), settings=_TINY if built_in else {}, max_length=33)


def test_labels_scores_and_padding_come_from_the_config(classifier: Path) -> None:
    text = load(str(classifier)).text
    assert text is not None
    assert (text.labels, text.scores, text.pad_id) == (("bad", "plain", "good"), "softmax", 0)
    _edit_json(classifier / "config.json", problem_type="multi_label_classification", pad_token_id=3)
    text = load(str(classifier)).text
    assert text is not None
    assert (text.scores, text.pad_id) == ("sigmoid", 3)


def test_a_folder_without_a_tokenizer_takes_arrays_only_with_a_notice(
    classifier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (classifier / "tokenizer.json").unlink()
    assert load(str(classifier)).text is None
    assert caplog.messages == [f"{classifier} has no tokenizer.json: the artifact takes arrays only"]
    assert caplog.records[0].name == "tx_export" and caplog.records[0].levelno == logging.WARNING


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(classifier: Path) -> None:
    (classifier / "tokenizer.json").write_text(tiny_tokenizer(130))
    with pytest.raises(LoadError, match=r"2 ids are outside the embedding's 0 to 127: 128 \('.+'\), 129"):
        load(str(classifier))


def test_a_tokenizer_that_cannot_be_read_is_refused(classifier: Path) -> None:
    (classifier / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(LoadError, match=r"tokenizer.json: not a tokenizer.json that can be read"):
        load(str(classifier))


def test_lower_case_of_sentence_transformers_is_put_into_the_tokenizer(tmp_path: Path) -> None:
    folder = tiny_bert_folder(tmp_path / "st", pooling=("mean",))
    tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text())
    tokenizer.normalizer = normalizers.NFC()
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    _edit_json(folder / "sentence_bert_config.json", do_lower_case=True)
    text = load(str(folder)).text
    assert text is not None
    ours = Tokenizer.from_str(text.tokenizer)
    assert ours.encode("ABC de").ids == tokenizer.encode("abc de").ids != tokenizer.encode("ABC de").ids
