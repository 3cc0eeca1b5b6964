"""The tokenizer of a checkpoint, and how long a text may be."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer, normalizers, processors

from tx_export._load_marian_text import marian_tokenizer
from tx_export._load_weights import read_json
from tx_export.errors import LoadError
from tx_export.spec import CacheSpec, Dim, Scores, TensorSpec, TextSpec

__all__ = [
    "bounded",
    "bounded_cache",
    "check_tokenizer",
    "ending_open",
    "read_optional",
    "read_text",
    "read_utf8",
    "special_tokens",
    "table_of",
    "vocabulary",
]

_log = logging.getLogger("tx_export")


def table_of(inputs: tuple[TensorSpec, ...]) -> int | None:
    """The largest size of the dimension `tokens`: the positions that exist."""
    for spec in inputs:
        for dim in spec.dims:
            if isinstance(dim, Dim) and dim.name == "tokens":
                return dim.bound
    return None


def bounded(specs: tuple[TensorSpec, ...], max_length: int | None) -> tuple[TensorSpec, ...]:
    """The specs with at most max_length tokens; unchanged if it is None."""
    if max_length is None:
        return specs
    shorter = Dim("tokens", max_length)
    return tuple(
        replace(
            spec, dims=tuple(shorter if isinstance(dim, Dim) and dim.name == "tokens" else dim for dim in spec.dims)
        )
        for spec in specs
    )


def bounded_cache(cache: CacheSpec | None, max_length: int | None) -> CacheSpec | None:
    """Of a decoder alone max_length bounds prompt and continuation together; behind an encoder, the encoder's text."""
    if cache is None or cache.cross or max_length is None:
        return cache
    if max_length < 2:
        raise LoadError(f"max-length is {max_length}; a text and what follows it have at least 2 tokens")
    return replace(cache, max_length=min(cache.max_length, max_length))


def vocabulary(inputs: tuple[TensorSpec, ...]) -> int | None:
    """How many ids the embedding has."""
    return next((int(spec.high) + 1 for spec in inputs if spec.name == "input_ids" and spec.high is not None), None)


def check_tokenizer(text: str, vocab_size: int | None, place: object) -> Tokenizer:
    """The parsed tokenizer; LoadError if it can't be read, or gives ids that the embedding doesn't have."""
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise LoadError(f"{place}: not a tokenizer.json that can be read ({error})") from error
    if vocab_size is None:
        return tokenizer
    over = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= vocab_size)
    if over:
        named = ", ".join(f"{index} ({token!r})" for index, token in over[:10])
        raise LoadError(f"{place}: {len(over)} ids are outside the embedding's 0 to {vocab_size - 1}: {named}")
    return tokenizer


def ending_open(text: TextSpec, config: Mapping[str, Any] = MappingProxyType({})) -> TextSpec:
    """Special tokens that a tokenizer puts behind a text are left out, so that the text can go on.

    `config` is tokenizer_config.json; what it says of the token before a text comes first, as in transformers.
    """
    tokenizer = Tokenizer.from_str(text.tokenizer)
    found = tokenizer.encode("a")
    begun, ended = (sum(takewhile(bool, mask)) for mask in (found.special_tokens_mask, found.special_tokens_mask[::-1]))
    names = found.tokens[:begun]
    if not {"add_bos_token", "add_eos_token"}.isdisjoint(config):
        names = [special_tokens(config)["bos_token"]] if config.get("add_bos_token") and config.get("bos_token") else []
    if begun == len(found) or (not ended and names == found.tokens[:begun]):
        return text
    ids = [(name, tokenizer.token_to_id(name)) for name in sorted(set(names))]
    if unknown := [name for name, index in ids if index is None]:
        raise LoadError(f"tokenizer_config.json: bos_token is {unknown[0]!r}, which tokenizer.json does not have")
    tokenizer.post_processor = processors.TemplateProcessing(single=[*names, "$A"], special_tokens=ids)
    return replace(text, tokenizer=tokenizer.to_str())


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of bos_token, eos_token and so on in tokenizer_config.json."""
    named = {key: value for key, value in config.items() if key.endswith("_token") and not key.startswith("add_")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: str(text) for key, text in texts.items() if text is not None}


def read_utf8(file: Path) -> str:
    """The text of a file; LoadError names it."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{file}: not readable ({error})") from error


def read_text(
    folder: Path, config: Mapping[str, Any], inputs: tuple[TensorSpec, ...], max_length: int | None, scores: Scores
) -> TextSpec | None:
    """From a checkpoint folder; `config` holds the spec's fields. None, with a notice, without a tokenizer.json."""
    table = table_of(inputs)
    file = folder / "tokenizer.json"
    text = read_utf8(file) if file.is_file() else marian_tokenizer(folder)
    if text is None:
        _log.warning("%s has no tokenizer.json: the artifact takes arrays only", folder)
        return None
    tokenizer = check_tokenizer(text, vocabulary(inputs), file)
    if read_optional(folder / "sentence_bert_config.json").get("do_lower_case"):
        text = _lowercased(tokenizer, text)
    return TextSpec(
        tokenizer=text,
        max_length=_text_length(folder, table, max_length),
        pad_id=int(config.get("pad_token_id") or 0),
        labels=tuple(config.get("labels") or ()),
        scores=scores,
    )


def _text_length(folder: Path, table: int | None, max_length: int | None) -> int:
    """By hand, else sentence-transformers' max_seq_length, else the tokenizer's limit; at most what the table holds."""
    if max_length is not None:
        return max_length
    limit = _limit(folder / "sentence_bert_config.json", "max_seq_length")
    if limit is None:
        limit = _limit(folder / "tokenizer_config.json", "model_max_length")
    if table is None:
        return 512 if limit is None or limit > 1e6 else int(limit)
    if limit is None:
        return table
    if limit > table:
        _log.warning(
            "the tokenizer's limit is %g tokens, the position table has %d: texts are cut at %d", limit, table, table
        )
    return int(min(limit, table))


def _limit(file: Path, key: str) -> float | None:
    value = read_optional(file).get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value) or value < 1:
        raise LoadError(f"{file}: {key} is {value!r}; expected a number of tokens")
    return value


def read_optional(file: Path) -> dict[str, Any]:
    """An object from a JSON file; empty if it isn't there."""
    return read_json(file) if file.is_file() else {}


def _lowercased(tokenizer: Tokenizer, text: str) -> str:
    """sentence-transformers' do_lower_case: lower case before the tokenizer's own normalizer, unless that does it."""
    normalizer = json.loads(text).get("normalizer")
    if '"Lowercase"' in json.dumps(normalizer) or (
        isinstance(normalizer, dict) and normalizer.get("lowercase") is True
    ):
        return text
    own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    out: str = tokenizer.to_str()
    return out
