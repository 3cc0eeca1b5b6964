"""Training on pairs of source and target: rows, loss, metrics, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import nn

from tx_export._training_bytes import train_byte_tokenizer
from tx_export._training_folder import started
from tx_export._training_pairs import Pair, Pairs, encode_pairs, greedy, read_pairs
from tx_export.cli import main
from tx_export.errors import TxExportError
from tx_export.load import load
from tx_export.models.seq2seq import Seq2seq
from tx_export.spec import GenerationSpec
from tx_export.training import LoopOptions, TrainOptions, TrainRecord, TrainResult, train

_EPS = torch.finfo(torch.float32).eps
_SPEC = Seq2seq(vocab_size=12, max_length=12, d_model=32, num_layers=1, num_heads=2, d_ff=64, dropout=0.0, norm="pre")
_IDS = GenerationSpec(eos=(3,), pad=0, start=2)
_LETTERS = "abcd"


def _ignore(record: TrainRecord) -> None: ...


def _tokenizer() -> Tokenizer:
    """Letters of sources and words of targets, in one vocabulary."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *_LETTERS, *(f"{letter}{letter}" for letter in _LETTERS)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 3)])
    tokenizer.add_special_tokens(words[:4])
    return tokenizer


def _pairs() -> list[Pair]:
    """Each letter doubled: all words of one to three letters."""
    words = ["".join(word) for count in (1, 2, 3) for word in itertools.product(_LETTERS, repeat=count)]
    return [Pair(word, " ".join(letter * 2 for letter in word)) for word in words]


def _options(folder: Path, **changes: Any) -> TrainOptions:
    (folder / "pairs.tsv").write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in _pairs()), encoding="utf-8")
    _tokenizer().save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "batch_size": 16,
        "steps": 220,
        "warmup": 30,
        "rate_factor": 0.4,
        "label_smoothing": 0.0,
        "average": 0.9,
        "evaluate_every": 55,
    } | changes
    return TrainOptions(
        _SPEC, folder / "pairs.tsv", folder / "out", tokenizer=folder / "tokenizer.json", loop=LoopOptions(**settings)
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return train(_options(tmp_path_factory.mktemp("pairs")), _ignore)


def _module() -> nn.Module:
    torch.manual_seed(0)
    return _SPEC.build()


def test_a_planted_rule_is_learnt_on_words_that_were_held_out(trained: TrainResult) -> None:
    assert trained.metrics["exact"] >= 0.75  # of 8 words; by chance less than one of 50 would be
    assert trained.metrics["accuracy"] >= trained.metrics["exact"]


def test_what_shares_its_weights_is_written_once_and_loads_as_the_model_that_was_trained(trained: TrainResult) -> None:
    file = trained.folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    assert [name for name in weights if tuple(weights[name].shape) == (12, 32)] == ["encoder.embedding.weight"]
    model = load("seq2seq", weights=str(file))
    assert model.text is not None
    tokenizer = Tokenizer.from_str(model.text.tokenizer)
    found = greedy(model.module, [tokenizer.encode(pair.source).ids for pair in _pairs()], _IDS, 12)
    right = sum(tokenizer.decode(ids) == pair.target for ids, pair in zip(found, _pairs(), strict=True))
    assert right >= 0.75 * len(_pairs())


def test_shared_weights_that_training_starts_from_go_everywhere(trained: TrainResult) -> None:
    spec, file = trained.spec, trained.folder / "model.safetensors"
    expected = safetensors.torch.load_file(file)["encoder.embedding.weight"]
    module = started(spec, None, file)
    for name in ("encoder.embedding.weight", "embedding.words.weight", "head.weight"):
        assert torch.equal(module.state_dict()[name], expected)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        train(_options(folder, steps=3), _ignore)
    name = "out/model.safetensors"
    assert (first / name).read_bytes() == (second / name).read_bytes()


def test_the_loss_is_the_mean_over_target_tokens_whatever_the_padding_and_the_parts() -> None:
    pairs, module = _pairs()[4:84:4], _module()
    rows = encode_pairs(_tokenizer(), pairs, _IDS, 12)
    total, tokens = torch.zeros(()), 0
    for source, target in zip(rows.sources, rows.targets, strict=True):  # reference: torch's loss, row by row
        ids = torch.tensor([source])
        logits = module(ids, torch.ones_like(ids), torch.tensor([target[:-1]]))[0]
        total = total + nn.functional.cross_entropy(
            logits, torch.tensor(target[1:]), label_smoothing=0.1, reduction="sum"
        )
        tokens += len(target) - 1
    expected = torch.autograd.grad(total / tokens, list(module.parameters()))
    for accumulation in (1, 4):
        options = LoopOptions(batch_size=20, accumulation=accumulation)
        objective = Pairs().objective(_SPEC, _tokenizer(), (pairs, pairs), options)
        module.zero_grad()
        loss = objective.gradients(module, range(20))
        # Sums of 20 rows of up to 4 tokens in another order.
        assert abs(loss - float(total.detach() / tokens)) <= 80 * _EPS * loss
        for weight, gradient in zip(module.parameters(), expected, strict=True):
            assert weight.grad is not None
            assert (weight.grad - gradient).abs().max() <= 80 * _EPS * max(float(g.abs().max()) for g in expected)


def test_the_greedy_answer_is_that_of_the_plain_form_token_by_token() -> None:
    module = _module().eval()
    sources = [[4, 5, 3], [6, 3], [7, 4, 5, 4, 3]]
    found = greedy(module, sources, _IDS, 8)
    for source, answer in zip(sources, found, strict=True):
        ids, written = torch.tensor([source]), [2]
        while len(written) <= 8:  # reference: the untouched module on one row, without a cache
            with torch.inference_mode():
                token = int(module(ids, torch.ones_like(ids), torch.tensor([written]))[0, -1].argmax())
            if token in _IDS.eos:
                break
            written.append(token)
        assert answer == written[1:]


def test_any_of_several_answers_to_a_source_is_right(trained: TrainResult) -> None:
    module = started(trained.spec, None, trained.folder / "model.safetensors")
    alone, both = [Pair("ab", "dd")], [Pair("ab", "dd"), Pair("ab", "aa bb")]
    found = []
    for held_out in (alone, both):
        objective = Pairs().objective(_SPEC, _tokenizer(), (alone, held_out), LoopOptions())
        found.append(objective.judge(module)["exact"])
    assert found == [0.0, 1.0]


def test_targets_are_words_of_the_vocabulary_where_those_decode_and_text_elsewhere() -> None:
    rows = encode_pairs(_tokenizer(), [Pair("ab", "bb aa"), Pair("ab", "ab")], _IDS, 12)
    assert rows.sources == [[4, 5, 3]] * 2
    assert rows.targets == [[2, 9, 8, 3], [2, 4, 5, 3]]
    tokenizer = train_byte_tokenizer(["one two", "two one"] * 9, 280, "$A [SEP]")
    (target,) = encode_pairs(tokenizer, [Pair("x", "two one")], _IDS, 12).targets
    assert tokenizer.decode(target[1:-1]) == "two one"


def test_sources_and_targets_are_cut_at_the_longest_that_the_model_takes() -> None:
    rows = encode_pairs(_tokenizer(), [Pair("a" * 30, " ".join(["bb"] * 30))], _IDS, 12)
    assert rows.sources == [[4] * 11 + [3]]
    assert rows.targets == [[2] + [9] * 11 + [3]]


def test_no_source_is_on_both_sides_of_the_split(tmp_path: Path) -> None:
    pairs = [Pair(source, f"{source} {answer}") for source in "abcdefghij" for answer in "xyz"]
    train_set, held_out = Pairs().split(tmp_path / "any", pairs, 0.2, 0)
    assert (len(train_set), len(held_out)) == (24, 6)
    assert not {pair.source for pair in train_set} & {pair.source for pair in held_out}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no examples; expected lines of source<TAB>target"),
        (b"a\tb\nalone\n", r"line 2: 1 column\(s\); expected source<TAB>target"),
        (b"a\tb\tc\n", r"line 1: 3 column\(s\)"),
        (b"a\t \n", "line 1: the target is empty"),
        (b" \tb\n", "line 1: the source is empty"),
        (b"a\t\xff\n", "line 1: not UTF-8"),
        (b"a\tb\n", "too few to hold some out"),
    ],
)
def test_a_bad_line_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.tsv").write_bytes(content)
    with pytest.raises(TxExportError, match=message):
        train(TrainOptions(_SPEC, tmp_path / "bad.tsv", tmp_path / "out"), _ignore)
    assert not (tmp_path / "out").exists()


def test_lines_are_read_as_pairs(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_bytes(b"\xef\xbb\xbfhello\tHH AH0 L OW1\r\n\nhello\tHH EH0 L OW1\n")
    assert read_pairs(tmp_path / "pairs.tsv") == [Pair("hello", "HH AH0 L OW1"), Pair("hello", "HH EH0 L OW1")]


def test_the_command_trains_a_seq2seq_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = _options(tmp_path)
    arguments = ["train", "seq2seq", "--data", str(options.data), "--tokenizer", str(options.tokenizer)]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "-o", str(options.output), "--steps", "1", "--batch", "8"])
    assert ended.value.code == 0
    assert "held-out exact" in capsys.readouterr().out
    assert (options.output / "model.safetensors").is_file()
