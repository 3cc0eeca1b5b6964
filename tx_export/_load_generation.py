"""What a checkpoint asks of a generation: generation_config.json, else config.json, read as transformers reads them."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tx_export._load_weights import read_json
from tx_export.errors import LoadError
from tx_export.spec import GenerationSpec

__all__ = ["read_generation"]

_log = logging.getLogger("tx_export")

_OWN = "generation_config.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# Keys of which an answer would depend, had we what they ask for; with the values that ask for nothing.
_LEFT: Mapping[str, tuple[object, ...]] = {
    "max_length": (20,),  # what transformers writes where nobody chose
    "max_new_tokens": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (),
    "begin_suppress_tokens": (),
    "forced_decoder_ids": (),
    "force_words_ids": (),
    "constraints": (),
    "sequence_bias": (),
    "diversity_penalty": (),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "guidance_scale": (1,),
    "penalty_alpha": (),
    "exponential_decay_length_penalty": (),
    "renormalize_logits": (),
    "token_healing": (),
    "dola_layers": (),
    "watermarking_config": (),
    "stop_strings": (),
    "max_time": (),
}
# Keys that change what is returned beside the text, or how it is computed, or how a token is drawn where one is.
_HARMLESS = re.compile(
    r"""
    _from_model_config | _commit_hash | _original_object_hash | transformers_version | trust_remote_code
    | use_cache | cache_\w+ | max_cache_len | output_\w+ | return_\w+ | remove_invalid_values | low_memory
    | is_assistant | \w*assistant_\w+ | prompt_lookup_\w+ | max_matching_ngram_size | target_lookbehind
    | speculation_type | use_mtp | compile_config | disable_compile | prefill_chunk_size | continuous_batching_config
    | do_sample | temperature | top_[kph] | min_p | typical_p | (epsilon|eta)_cutoff
    | (bos|eos|pad|unk|sep|cls|mask|decoder_start|forced_bos|forced_eos)_token_id
    | num_beams | (length|repetition)_penalty | early_stopping | no_repeat_ngram_size | min_length | min_new_tokens
    | bad_words_ids | suppress_tokens
    """,
    re.VERBOSE,
)


def read_generation(
    folder: Path, config: Mapping[str, Any], vocab_size: int | None, is_encoder_decoder: bool
) -> GenerationSpec:
    """`config` is config.json. What can't be followed is told in one notice; a wrong type is a LoadError."""
    asked = _Asked.read(folder, config, vocab_size)
    eos, bos = asked.ids("eos_token_id"), asked.id("bos_token_id")
    start = asked.id("decoder_start_token_id")
    spec = GenerationSpec(
        eos=eos,
        bos=bos,
        pad=asked.id("pad_token_id"),
        start=(bos if start is None else start) if is_encoder_decoder else None,
        forced_bos=asked.id("forced_bos_token_id"),
        forced_eos=asked.id("forced_eos_token_id"),
        suppressed=_suppressed(asked, eos),
        beams=asked.count("num_beams", 1, least=1),
        length_penalty=asked.number("length_penalty", 1.0),
        repetition_penalty=_repetition_penalty(asked),
        early_stopping=_early_stopping(asked),
        no_repeat_ngram=asked.count("no_repeat_ngram_size", 0),
        min_new_tokens=_min_new_tokens(asked, is_encoder_decoder),
    )
    _tell_sampling(folder, asked)
    left = [*asked.left, *asked.unsupported()]
    if left:
        _log.warning("%s: not followed where text is generated: %s", folder, ", ".join(left))
    return spec


@dataclass(frozen=True)
class _Asked:
    """The keys of both files, without those that are null, and what could not be followed."""

    values: Mapping[str, Any]
    files: Mapping[str, str]  # that a key is from
    vocab_size: int | None
    left: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any], vocab_size: int | None) -> _Asked:
        """transformers takes config.json only where generation_config.json is not there; ids that it lacks are taken
        from there here too."""
        own = read_json(folder / _OWN) if (folder / _OWN).is_file() else None
        known = {key: value for key, value in config.items() if _HARMLESS.fullmatch(key) or key in _LEFT}
        rest = known if own is None else {key: value for key, value in known.items() if key.endswith("_token_id")}
        values = {key: value for key, value in (rest | (own or {})).items() if value is not None}
        return cls(values, {key: _OWN if key in (own or {}) else "config.json" for key in values}, vocab_size)

    def wrong(self, key: str, expected: str) -> LoadError:
        text = repr(self.values[key])
        return LoadError(f"{self.files[key]}: {key} is {text[:80]}; expected {expected}")

    def leave(self, key: str) -> None:
        self.left.append(f"{key} {self.values[key]!r}"[:80])

    def unsupported(self) -> Iterable[str]:
        """Keys that ask for something, but those that are followed or change nothing."""
        for key, value in self.values.items():
            if value and value not in _LEFT.get(key, ()) and not _HARMLESS.fullmatch(key):
                yield f"{key} {value!r}"[:80]

    def id(self, key: str) -> int | None:
        """One id, in the vocabulary."""
        found = self.values.get(key)
        if found is not None and not _is_whole(found):
            raise self.wrong(key, "the id of a token")
        return next(iter(self.known(key, () if found is None else (found,))), None)

    def ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of them."""
        found = self.values.get(key, ())
        several = tuple(found) if isinstance(found, list | tuple) else (found,)
        if not all(map(_is_whole, several)):
            raise self.wrong(key, "the ids of tokens")
        return self.known(key, several)

    def known(self, key: str, ids: Collection[int]) -> tuple[int, ...]:
        """Those in the vocabulary; -1 stands for none in some checkpoints."""
        known = tuple(index for index in ids if index >= 0 and (self.vocab_size is None or index < self.vocab_size))
        if any(index != -1 for index in set(ids) - set(known)):
            self.left.append(f"{key} {self.values[key]!r}, of {self.vocab_size} tokens"[:80])
        return known

    def count(self, key: str, default: int, least: int = 0) -> int:
        found = self.values.get(key, default)
        if not _is_whole(found) or found < least:
            raise self.wrong(key, f"a whole number from {least} up")
        return int(found)

    def number(self, key: str, default: float) -> float:
        found = self.values.get(key, default)
        if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
            raise self.wrong(key, "a number")
        return float(found)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _suppressed(asked: _Asked, eos: tuple[int, ...]) -> tuple[int, ...]:
    """suppress_tokens, and the bad words of one token that don't end the text."""
    words = asked.values.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(word, list) and all(map(_is_whole, word)) for word in words):
        raise asked.wrong("bad_words_ids", "lists of ids")
    if any(len(word) != 1 for word in words):
        asked.leave("bad_words_ids")
    single = {word[0] for word in words if len(word) == 1}
    return tuple(sorted({*asked.ids("suppress_tokens"), *asked.known("bad_words_ids", single - set(eos))}))


def _repetition_penalty(asked: _Asked) -> float:
    found = asked.number("repetition_penalty", 1.0)
    if found <= 0:
        raise asked.wrong("repetition_penalty", "a number above 0")
    return found


def _early_stopping(asked: _Asked) -> bool:
    found = asked.values.get("early_stopping", False)
    if found == "never":
        asked.leave("early_stopping")
        return False
    if not isinstance(found, bool):
        raise asked.wrong("early_stopping", "true, false or never")
    return found


def _min_new_tokens(asked: _Asked, is_encoder_decoder: bool) -> int:
    """min_length counts what a decoder begins with: one token behind an encoder, else the prompt."""
    length = asked.count("min_length", 0)
    if "min_new_tokens" in asked.values:
        return asked.count("min_new_tokens", 0)
    if is_encoder_decoder:
        return max(length - 1, 0)
    if length:
        asked.leave("min_length")
    return 0


def _tell_sampling(folder: Path, asked: _Asked) -> None:
    if not asked.values.get("do_sample"):
        return
    temperature = asked.values.get("temperature", 1.0)
    given = {key: asked.values[key] for key in _SAMPLING if key in asked.values} | {"temperature": temperature}
    options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in given.items())
    _log.warning(
        "%s: asks for tokens to be drawn; the likeliest ones are taken unless run is told %s", folder, options[:200]
    )
