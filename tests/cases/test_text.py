"""Cases of text: limits, empty and huge texts, half characters, and ids that the model lacks."""

from __future__ import annotations

import io
import json
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from tx_export.artifact import seal
from tx_export.load import load
from tx_export.metrics import fidelity_bound
from tx_export.runtime import Model, TxExportError, read_manifest, run

_LIMIT = 128
_PROSE = "the film was good, a bad one. "


@pytest.fixture(scope="module")
def model(hf_artifact: Path) -> Model:
    return Model(hf_artifact, threads=1)


@pytest.fixture(scope="module")
def tokenizer(hf_checkpoint: Path) -> Any:
    """The checkpoint's own, without any limit."""
    return tokenizers.Tokenizer.from_file(str(hf_checkpoint / "tokenizer.json"))


@pytest.fixture(scope="module")
def eager(hf_checkpoint: Path) -> Any:
    """transformers' own model."""
    from transformers import BertForSequenceClassification

    model: Any = BertForSequenceClassification.from_pretrained(hf_checkpoint)
    return model.eval()


def probabilities(eager: Any, ids: list[int]) -> np.ndarray:
    """Hugging Face's answer to one row of ids, all of the first text."""
    with torch.no_grad():
        logits = eager(torch.tensor([ids]), token_type_ids=torch.zeros(1, len(ids), dtype=torch.int64)).logits
    return np.asarray(logits.softmax(-1)[0].numpy())


def scores(result: dict[str, Any]) -> np.ndarray:
    return np.array(list(result["scores"].values()))


# A probability moves by no more than the largest move of the logits, whose bound is that of fp32.
_BOUND = fidelity_bound(1.0)


def test_b205_token_types_that_the_tokenizer_does_not_give_are_zeros(
    hf_artifact: Path, eager: Any, tokenizer: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(hf_artifact, tmp_path / "a"))
    known = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    known["post_processor"] = None  # what adds special tokens also sets the types
    (folder / "tokenizer.json").write_text(json.dumps(known), encoding="utf-8")
    seal(folder, read_manifest(hf_artifact))
    [found] = Model(folder, threads=1)(["good film"])
    ids = tokenizer.encode("good film", add_special_tokens=False).ids
    assert np.abs(scores(found) - probabilities(eager, ids)).max() <= _BOUND


@pytest.mark.parametrize("limit", [int(1e30), 512, None])
def test_b206_the_limit_is_the_position_table_where_the_tokenizer_allows_more(
    hf_checkpoint: Path, tmp_path: Path, limit: int | None
) -> None:
    folder = Path(shutil.copytree(hf_checkpoint, tmp_path / "hf"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit} if limit else {}))
    text = load(str(folder)).text
    assert text is not None and text.max_length == _LIMIT


def test_b206_a_text_over_the_limit_is_cut_with_its_special_tokens_kept_and_said(
    hf_artifact: Path, eager: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join("abcdefghij"[i % 10] for i in range(500))
    full = tokenizer.encode(text).ids
    [found] = Model(hf_artifact, threads=1)([text])
    assert len(full) == 502 and found["truncated"] is True
    assert np.abs(scores(found) - probabilities(eager, [*full[: _LIMIT - 1], full[-1]])).max() <= _BOUND
    assert capsys.readouterr().err.startswith(f"notice: text 0 was cut to {_LIMIT} tokens")


@pytest.mark.parametrize("text", ["", " ", "\n", "\u200b", "\x00"])
def test_b208_an_empty_text_is_answered_from_its_special_tokens(
    model: Model, eager: Any, tokenizer: Any, text: str
) -> None:
    for texts in ([text], [text, "hello"], ["hello", text]):
        for given, found in zip(texts, model(texts), strict=True):
            expected = probabilities(eager, tokenizer.encode(given).ids)
            assert np.abs(scores(found) - expected).max() <= _BOUND


@pytest.mark.parametrize(
    "text",
    [
        "x" * 100_000,
        (_PROSE * 4_000)[:100_000],
        "\N{GRINNING FACE}" * 20_000,
        " " * 100_000,
        "a" + " " * 100_000 + "b",
        "\x00" * 100_000,
        "a\u0301" * 50_000,
        "[CLS]" * 20_000,
        "\u200d" * 100_000,
    ],
)
def test_b209_a_hundred_thousand_characters_are_cut_before_they_cost_much(
    model: Model, eager: Any, tokenizer: Any, text: str
) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    [found] = model([text])
    # The case allows 5 s and 500 MB; CPU time of this process, with room for a loaded machine, only shows a hang.
    assert time.process_time() - started <= 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before <= 500 * 1024
    full = tokenizer.encode(text).ids
    ids = full if len(full) <= _LIMIT else [*full[: _LIMIT - 1], full[-1]]
    assert np.abs(scores(found) - probabilities(eager, ids)).max() <= _BOUND


def test_b209_most_of_a_hundred_thousand_characters_is_not_tokenized(model: Model) -> None:
    assert model._tokenizer is not None
    assert len(model._tokenizer._shorten((_PROSE * 4_000)[:100_000])) <= 5_000


def test_b210_half_a_character_in_a_file_is_replaced_with_a_notice(
    hf_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"text": "good"}, {"text": "bad \ud83d film", "pair": "\udc00"}, {"text": "hello"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    out = io.StringIO()
    run(hf_artifact, source=tmp_path / "a.jsonl", as_json=True, out=out, threads=1)
    opened = Model(hf_artifact, threads=1)
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    assert found == opened(["good", ("bad \ufffd film", "\ufffd"), "hello"])
    assert "notice: text 1 holds half of a surrogate pair; U+FFFD" in capsys.readouterr().err


@pytest.mark.parametrize("value", [-1, -100, 1000, 2**40])
def test_b213_ids_that_the_model_lacks_are_refused_with_place_and_range(cls_artifact: Path, value: int) -> None:
    ids = np.full((3, 5), 7)
    ids[1, 4] = value
    message = rf"input 'input_ids': {value} at row 1, position 4; allowed 0\.\.999"
    with pytest.raises(TxExportError, match=message):
        Model(cls_artifact, threads=1).run_arrays({"input_ids": ids, "attention_mask": np.zeros((3, 5), int)})


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (None, "texts: expected a list of texts, not one NoneType"),
        (5, "texts: expected a list of texts, not one int"),
        (b"good", "texts: expected a list of texts, not one bytes"),
        ("good", "texts: expected a list of texts, not one str"),
        ({"text": "good"}, "texts: expected a list of texts, not one dict"),
        (["good", None], "text 1: expected a str or a pair of them, not NoneType"),
        ([b"good"], "text 0: expected a str or a pair of them, not bytes"),
        (["good", 5], "text 1: expected a str or a pair of them, not int"),
        ([["a", "b", "c"]], "text 0: expected a str or a pair of them, not list"),
        ([("a", None)], "text 0: expected a str or a pair of them, not tuple"),
        (np.array([1.5, 2]), "text 0: expected a str or a pair of them, not float64"),
    ],
)
def test_b208_what_is_no_text_is_refused_by_index_and_type(model: Model, texts: Any, message: str) -> None:
    with pytest.raises(TxExportError, match=message):
        model(texts)
