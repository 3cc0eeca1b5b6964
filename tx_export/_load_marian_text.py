"""A tokenizer.json for Marian: pieces and scores of source.spm, ids of vocab.json, without the sentencepiece package.

    source.spm, a protobuf   pieces with their log probabilities, and how text is normalized
    vocab.json               ids of the pieces of both languages

Of the cuts of a text the likeliest is taken, as by sentencepiece (Kudo 2018). Letters that source.spm lacks are looked
up one by one; transformers looks up runs of them.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tx_export._load_weights import read_json
from tx_export.errors import LoadError

__all__ = ["marian_tokenizer"]

_log = logging.getLogger("tx_export")

_Message: TypeAlias = dict[int, list["int | float | bytes"]]
_Value = TypeVar("_Value", int, float, bytes)

_SPECIAL = ("</s>", "<unk>", "<pad>")
_CODE = re.compile(r">>.+<<")  # of the language to translate into
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of sentencepiece_model.proto
_PIECE, _SCORE, _TYPE = 1, 2, 3
_NORMAL, _USER_DEFINED, _BYTE = 1, 4, 6
_MODEL_TYPE, _UNIGRAM = 3, 1
_CHARACTERS, _DUMMY_PREFIX, _REMOVE_SPACES = 2, 3, 4
_UNKNOWN_PENALTY = 10.0  # below the least likely piece, in sentencepiece and in tokenizers


def marian_tokenizer(folder: Path) -> str | None:
    """The text of a tokenizer.json; None where the files aren't there or, with a notice, hold what it can't."""
    model, table = folder / "source.spm", folder / "vocab.json"
    if not (model.is_file() and table.is_file()):
        return None
    ids = read_json(table)
    try:
        parsed = _message(model.read_bytes())
        if reason := _unsupported(folder, parsed, ids):
            _log.warning("%s: no tokenizer.json can be made of source.spm and vocab.json: %s", folder, reason)
            return None
        scores = {_text(piece): _one(piece, _SCORE, 0.0) for piece in _pieces(parsed) if _kind(piece) == _NORMAL}
        made = _assembled(_message(_one(parsed, _NORMALIZER, b"")), ids, scores)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise LoadError(f"{model}: not a sentencepiece model that can be read ({error})") from error
    if unknown := sorted(scores.keys() - ids.keys()):
        _log.warning("%s: %d pieces of source.spm have no id in vocab.json, say %r", folder, len(unknown), unknown[0])
    return made


def _unsupported(folder: Path, parsed: _Message, ids: Mapping[str, object]) -> str | None:
    numbers = [index for index in ids.values() if isinstance(index, int) and not isinstance(index, bool)]
    kinds = {_kind(piece) for piece in _pieces(parsed)}
    if sorted(numbers) != list(range(len(ids))):
        return "the ids are not 0, 1, 2 and so on"
    if missing := [token for token in _SPECIAL if token not in ids]:
        return f"{missing[0]} has no id"
    if (folder / "target_vocab.json").is_file():
        return "the languages have ids of their own"
    if _one(_message(_one(parsed, _TRAINER, b"")), _MODEL_TYPE, _UNIGRAM) != _UNIGRAM:
        return "the pieces have no probabilities"
    if kinds & {_USER_DEFINED, _BYTE} or _NORMAL not in kinds:
        return "it has pieces of bytes or of its own"
    return None


def _assembled(rules: _Message, ids: Mapping[str, int], scores: Mapping[str, float]) -> str:
    least = min(scores.values()) - _UNKNOWN_PENALTY

    def score(piece: str) -> float:
        """A piece of the other language is less likely than its letters one by one."""
        return 0.0 if piece in special else scores.get(piece, least * len(piece) - 1)

    special = {piece: AddedToken(piece, special=True, normalized=False, rstrip=bool(_CODE.fullmatch(piece)))
               for piece in ids if piece in _SPECIAL or _CODE.fullmatch(piece)}  # fmt: skip
    vocabulary = [(piece, score(piece)) for piece in sorted(ids, key=lambda piece: ids[piece])]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=ids["<unk>"], byte_fallback=False))
    tokenizer.normalizer = _normalizer(rules)
    prefix = "always" if _one(rules, _DUMMY_PREFIX, 1) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prefix)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", ids["</s>"])]
    )
    tokenizer.add_special_tokens(list(special.values()))
    text: str = tokenizer.to_str()
    return text


def _normalizer(rules: _Message) -> normalizers.Normalizer:
    characters = _one(rules, _CHARACTERS, b"")
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(characters)] if characters else []
    if _one(rules, _REMOVE_SPACES, 1):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    return normalizers.Sequence(steps)


def _pieces(parsed: _Message) -> list[_Message]:
    return [_message(piece) for piece in parsed.get(_PIECES, []) if isinstance(piece, bytes)]


def _text(piece: _Message) -> str:
    return _one(piece, _PIECE, b"").decode("utf-8")


def _kind(piece: _Message) -> int:
    return _one(piece, _TYPE, _NORMAL)


def _one(message: _Message, number: int, default: _Value) -> _Value:
    """The last value of a field, as protobuf has it."""
    value = message.get(number, [default])[-1]
    if not isinstance(value, type(default)):
        raise ValueError(f"field {number} is a {type(value).__name__}")
    return value


def _message(data: bytes) -> _Message:
    message: _Message = {}
    for number, value in _fields(data):
        message.setdefault(number, []).append(value)
    return message


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Number and value of each field of a protobuf message; fixed fields of 64 bits are whole numbers."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield number, value
        elif wire == 2:
            size, place = _varint(data, place)
            if place + size > len(data):
                raise ValueError("cut short")
            yield number, data[place : place + size]
            place += size
        elif wire in (1, 5):
            form, size = ("<q", 8) if wire == 1 else ("<f", 4)
            yield number, struct.unpack_from(form, data, place)[0]
            place += size
        else:
            raise ValueError(f"wire type {wire}")


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
    raise ValueError("a number of more than 64 bits")
