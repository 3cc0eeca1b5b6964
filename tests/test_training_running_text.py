"""Training on running text: rows, loss, perplexity, the byte-level tokenizer, and dropout by bytes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tx_export._training_bytes import train_byte_tokenizer
from tx_export._training_dropout import ByteDropout
from tx_export._training_running_text import RunningText, encode_lines
from tx_export._training_text import read_tokenizer
from tx_export.errors import TxExportError
from tx_export.models.lm import Lm
from tx_export.spec import GenerationSpec
from tx_export.training import LoopOptions, TrainOptions, TrainRecord, train

_EPS = torch.finfo(torch.float32).eps
_SPEC = Lm(vocab_size=270, max_length=10, d_model=16, num_layers=1, num_heads=2, d_ff=32, dropout=0.0)
_IDS = GenerationSpec(eos=(3,), bos=2, pad=0)
_LINES = [
    "one two three four five six",
    "naïve – café",
    "two",
    "four five six one two three, four five six one two three",
]


def _ignore(record: TrainRecord) -> None: ...


def test_a_byte_level_tokenizer_decodes_to_the_text_and_is_a_function_of_its_texts() -> None:
    tokenizers = [train_byte_tokenizer(_LINES, 280, "[CLS] $A") for _ in range(3)]
    assert len({tokenizer.to_str() for tokenizer in tokenizers}) == 1
    assert [tokenizers[0].id_to_token(i) for i in range(4)] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    for text in (*_LINES, "  other  words, 語\n"):
        encoded = tokenizers[0].encode(text)
        assert encoded.ids[0] == 2 and 3 not in encoded.ids
        assert tokenizers[0].decode(encoded.ids) == text


def test_too_few_entries_for_all_bytes_are_refused() -> None:
    with pytest.raises(TxExportError, match="vocab_size is 200; bytes and special tokens need 260"):
        train_byte_tokenizer(_LINES, 200, "[CLS] $A")


def test_every_token_but_the_first_of_a_line_is_foretold_once() -> None:
    tokenizer = train_byte_tokenizer(_LINES, 270, "[CLS] $A")
    rows = encode_lines(tokenizer, _LINES, _IDS, 10)
    whole = [[2, *tokenizer.encode(line, add_special_tokens=False).ids, 3] for line in _LINES]
    assert max(map(len, rows)) == 11 < max(map(len, whole))
    assert [token for row in rows for token in row[1:]] == [token for row in whole for token in row[1:]]


def test_loss_and_perplexity_are_those_of_each_row_alone() -> None:
    tokenizer = train_byte_tokenizer(_LINES, 270, "[CLS] $A")
    torch.manual_seed(0)
    module = _SPEC.build().eval()
    rows = encode_lines(tokenizer, _LINES, _IDS, 10)
    total = torch.zeros(())
    for row in rows:  # reference: torch's loss of the untouched module, a row at a time, without padding
        ids = torch.tensor([row[:-1]])
        total = total + nn.functional.cross_entropy(
            module(ids, torch.ones_like(ids))[0], torch.tensor(row[1:]), reduction="sum"
        )
    tokens, words = sum(len(row) - 1 for row in rows), sum(len(line.split()) for line in _LINES)
    options = LoopOptions(batch_size=len(rows), label_smoothing=0.0)
    objective = RunningText().objective(_SPEC, tokenizer, (_LINES, _LINES), options)
    metrics, loss = objective.judge(module), float(total.detach())
    # Sums of so many tokens in another order.
    assert abs(metrics["loss"] - loss / tokens) <= tokens * _EPS * metrics["loss"]
    assert abs(objective.gradients(module, range(len(rows))) - loss / tokens) <= tokens * _EPS * metrics["loss"]
    assert metrics["perplexity"] == pytest.approx(math.exp(loss / tokens), rel=2 * tokens * _EPS * loss / tokens)
    assert metrics["word_perplexity"] == pytest.approx(math.exp(loss / words), rel=2 * tokens * _EPS * loss / words)


def test_text_that_repeats_itself_is_learnt(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three four five six\n" * 40, encoding="utf-8")
    loop = LoopOptions(batch_size=8, steps=60, warmup=10, rate_factor=0.2, label_smoothing=0.0, evaluate_every=30)
    result = train(TrainOptions(_SPEC, tmp_path / "text.txt", tmp_path / "out", loop=loop), _ignore)
    # A model that knew only how often each token occurs would have more than 5; untrained, about 270.
    assert result.metrics["perplexity"] < 1.5
    tokenizer = read_tokenizer(result.folder / "tokenizer.json")
    assert tokenizer.encode("one").ids[0] == 2 and isinstance(result.spec, Lm)
    assert result.spec.vocab_size == tokenizer.get_vocab_size()


def test_a_file_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n \n", encoding="utf-8")
    with pytest.raises(TxExportError, match=r"text\.txt: no text"):
        train(TrainOptions(_SPEC, tmp_path / "text.txt", tmp_path / "out"), _ignore)


def test_dropout_by_bytes_drops_its_share_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    x = torch.ones(200_001, requires_grad=True)
    with ByteDropout():
        out = nn.Dropout(0.1)(x)
    share, kept = 26 / 256, 256 / 230  # a tenth in 256ths, and what makes up for it
    assert set(out.unique().tolist()) == {0.0, torch.tensor(kept).item()}
    # Five deviations of a binomial share.
    assert abs(float((out == 0).float().mean()) - share) <= 5 * math.sqrt(share * (1 - share) / len(x))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, out.detach())


def test_dropout_by_bytes_follows_torchs_generator_and_does_nothing_in_eval_mode() -> None:
    x, drawn = torch.ones(50), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with ByteDropout():
            drawn.append(nn.functional.dropout(x, 0.5))
            assert torch.equal(nn.Dropout(0.5).eval()(x), x)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
