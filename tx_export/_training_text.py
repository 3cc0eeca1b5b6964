"""Text for training: labelled TSV files, a WordPiece tokenizer of their own, and batches of rows of like length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

from tx_export._load_text import read_utf8
from tx_export._training_lines import read_fields
from tx_export.errors import LoadError

__all__ = [
    "SPECIAL_TOKENS",
    "Batch",
    "Example",
    "Rows",
    "collate",
    "encode",
    "encode_texts",
    "epoch_batches",
    "held_out_of",
    "labels_of",
    "padded",
    "read_examples",
    "read_texts",
    "read_tokenizer",
    "require_special_tokens",
    "split",
    "train_tokenizer",
]

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")  # ids 0 to 3
_BUCKET = 50  # batches that are sorted by length together


@dataclass(frozen=True)
class Example:
    """A labelled text; `confidence` is the label's probability, the rest is shared by the other labels."""

    label: str
    text: str
    confidence: float = 1.0


@dataclass(frozen=True)
class Rows:
    """Encoded examples: ids of each row, the label's index [N] and its probability [N]."""

    ids: list[list[int]]
    targets: Tensor
    confidence: Tensor


@dataclass(frozen=True)
class Batch:
    """Rows padded to the longest."""

    input_ids: Tensor  # int64 [B, T]
    attention_mask: Tensor  # int64 [B, T]
    targets: Tensor  # int64 [B]
    confidence: Tensor  # float32 [B]


def read_examples(path: Path) -> list[Example]:
    """Lines `label<TAB>text[<TAB>confidence]` in UTF-8, blank lines aside; LoadError names the line that is wrong."""
    return [_example(place, fields) for place, fields in read_fields(path, "label<TAB>text")]


def read_texts(path: Path) -> list[Example]:
    """Labelled lines as `read_examples` has them; in a file without a tab each line is a text, and no label is ""."""
    text = read_utf8(path)
    if "\t" in text:
        return read_examples(path)
    lines = [line.strip() for line in text.removeprefix("\ufeff").split("\n") if line.strip()]
    if not lines:
        raise LoadError(f"{path}: no text")
    return [Example("", line) for line in lines]


def _example(place: str, fields: list[str]) -> Example:
    if not 2 <= len(fields) <= 3:
        raise LoadError(f"{place}: {len(fields)} column(s); expected label<TAB>text[<TAB>confidence]")
    label, text = fields[0].strip(), fields[1].strip()
    if not label or not text:
        raise LoadError(f"{place}: the {'label' if not label else 'text'} is empty")
    return Example(label, text, _confidence(place, fields[2]) if len(fields) == 3 else 1.0)


def _confidence(place: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise LoadError(f"{place}: confidence {text!r} is not a number") from error
    if not 0 <= value <= 1:
        raise LoadError(f"{place}: confidence {text} is outside [0, 1]")
    return value


def labels_of(path: Path, examples: Sequence[Example], preferred: tuple[str, ...]) -> tuple[str, ...]:
    """The labels in `preferred` order if the sets are equal, else sorted; LoadError when there is only one."""
    found = sorted({example.label for example in examples})
    if len(found) < 2:
        raise LoadError(f"{path}: the only label is {found[0]!r}; a classifier needs at least two")
    return preferred if sorted(preferred) == found else tuple(found)


def split(path: Path, examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Training and held-out part, a seeded random choice; both keep the file's order."""
    chosen = held_out_of(path, len(examples), share, seed)
    return (
        [example for i, example in enumerate(examples) if i not in chosen],
        [example for i, example in enumerate(examples) if i in chosen],
    )


def held_out_of(path: Path, count: int, share: float, seed: int) -> set[int]:
    """Which of so many examples to hold out."""
    held = max(1, round(count * share))
    if held >= count:
        raise LoadError(f"{path}: {count} example(s) are too few to hold some out; give a held-out file")
    return set(torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:held].tolist())


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Lower-case WordPiece of at most `vocab_size` entries that writes [CLS] text [SEP].

    The trainer numbers single characters in the order of a hash table, which changes from run to run and settles ties
    between merges; naming them all as special tokens, in sorted order, makes the vocabulary a function of the texts.
    """
    normalizer, pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = (word for text in texts for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text)))
    characters = sorted({character for word in words for character in word})
    fixed = [*SPECIAL_TOKENS, *characters, *(f"##{character}" for character in characters)]
    if len(fixed) > vocab_size:
        raise LoadError(
            f"vocab_size is {vocab_size}; the text's {len(characters)} characters need {len(fixed)} entries"
        )
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer, learner.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=fixed, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    return _tokenizer(learner.get_vocab(with_added_tokens=True), normalizer, pre_tokenizer)


def _tokenizer(
    vocabulary: dict[str, int], normalizer: normalizers.Normalizer, pre_tokenizer: pre_tokenizers.PreTokenizer
) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json, without its own padding and truncation."""
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise LoadError(f"{path}: not a tokenizer.json: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def require_special_tokens(tokenizer: Tokenizer, place: object) -> None:
    """LoadError where word dropout would take special tokens for words."""
    if [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] != [0, 1, 2, 3]:
        raise LoadError(f"{place}: word dropout needs {', '.join(SPECIAL_TOKENS)} as ids 0 to 3")


def encode(tokenizer: Tokenizer, examples: Sequence[Example], labels: tuple[str, ...], max_length: int) -> Rows:
    """Ids cut at `max_length`, the closing special token kept; LoadError for a label that isn't among `labels`."""
    unknown = sorted({example.label for example in examples} - set(labels))
    if unknown:
        raise LoadError(f"held-out label {unknown[0]!r} is not in the training data; it has {', '.join(labels)}")
    return Rows(
        encode_texts(tokenizer, [example.text for example in examples], max_length),
        torch.tensor([labels.index(example.label) for example in examples]),
        torch.tensor([example.confidence for example in examples]),
    )


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """Ids of each text cut at `max_length`, the closing special token kept."""
    try:
        tokenizer.enable_truncation(max_length)
        encodings = tokenizer.encode_batch(list(texts))
    except Exception as error:
        raise LoadError(f"the tokenizer can't cut texts to {max_length} tokens: {error}") from error
    tokenizer.no_truncation()
    return [list(encoding.ids) for encoding in encodings]


def epoch_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Row numbers of each batch: shuffled, sorted by length within buckets, the batches shuffled again."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order: list[int] = torch.randperm(len(lengths), generator=generator).tolist()
    bucket = batch_size * _BUCKET
    batches = [
        rows[start : start + batch_size]
        for rows in (sorted(order[i : i + bucket], key=lengths.__getitem__) for i in range(0, len(order), bucket))
        for start in range(0, len(rows), batch_size)
    ]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def collate(rows: Rows, chosen: Sequence[int], size: int, pad_id: int = 0) -> Iterator[Batch]:
    """The chosen rows as batches of at most `size`, each padded to its longest row."""
    for start in range(0, len(chosen), size):
        part = chosen[start : start + size]
        ids = [rows.ids[i] for i in part]
        mask = padded([[1] * len(row) for row in ids], 0)
        yield Batch(padded(ids, pad_id), mask, rows.targets[part], rows.confidence[part])


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """int64 [rows, the longest], `value` behind the end of each."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.int64)
