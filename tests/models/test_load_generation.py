"""What a checkpoint asks of a generation, and the tokenizer of its prompts."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tx_export import runtime
from tx_export._load_generation import read_generation
from tx_export._load_marian_text import marian_tokenizer
from tx_export._load_text import ending_open
from tx_export.compiler import BuildOptions, build
from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.spec import GenerationSpec, TextSpec
from tx_export.testing import tiny_tokenizer

from .checkpoints import save_tokenizer

_VOCABULARY = 50


def _read(
    folder: Path, config: dict[str, Any], own: dict[str, Any] | None = None, behind_encoder: bool = False
) -> GenerationSpec:
    if own is not None:
        (folder / "generation_config.json").write_text(json.dumps(own))
    return read_generation(folder, config, _VOCABULARY, behind_encoder)


def test_every_key_that_is_followed_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = {
        "eos_token_id": [2, 3], "bos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 4,
        "forced_bos_token_id": 5, "forced_eos_token_id": 2, "bad_words_ids": [[7], [2]], "suppress_tokens": [9, 8],
        "num_beams": 4, "length_penalty": 0.5, "early_stopping": True, "no_repeat_ngram_size": 3, "min_length": 6,
        "repetition_penalty": 1.1,
    }  # fmt: skip
    # An end of the text is no bad word, as transformers has it; min_length counts the token a decoder starts with.
    assert _read(tmp_path, {}, own, behind_encoder=True) == GenerationSpec(
        eos=(2, 3), bos=1, pad=0, start=4, forced_bos=5, forced_eos=2, suppressed=(7, 8, 9), beams=4,
        length_penalty=0.5, early_stopping=True, no_repeat_ngram=3, min_new_tokens=5, repetition_penalty=1.1,
    )  # fmt: skip
    assert not caplog.messages


def test_nothing_said_is_a_plain_generation_and_no_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert _read(tmp_path, {"hidden_size": 8, "eos_token_id": None}) == GenerationSpec()
    assert not caplog.messages


def test_generation_config_wins_and_config_lends_it_ids_only(tmp_path: Path) -> None:
    config = {"eos_token_id": 2, "bos_token_id": 1, "num_beams": 5, "length_penalty": 2.0}
    assert _read(tmp_path, config) == GenerationSpec(eos=(2,), bos=1, beams=5, length_penalty=2.0)
    assert _read(tmp_path, config, {"eos_token_id": 3}) == GenerationSpec(eos=(3,), bos=1)


def test_transformers_reads_the_same(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=8, vocab_size=_VOCABULARY)
    config.eos_token_id, config.bos_token_id = 7, 6
    theirs = transformers.GenerationConfig.from_model_config(config)
    spec = _read(tmp_path, config.to_dict())
    assert (spec.eos, spec.bos, spec.pad) == ((theirs.eos_token_id,), theirs.bos_token_id, theirs.pad_token_id)


def test_a_decoder_behind_an_encoder_starts_with_bos_if_nothing_else_is_said(tmp_path: Path) -> None:
    assert _read(tmp_path, {"bos_token_id": 1}, behind_encoder=True).start == 1
    assert _read(tmp_path, {"bos_token_id": 1}).start is None


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("eos_token_id", "2", "the ids of tokens"),
        ("eos_token_id", [2, True], "the ids of tokens"),
        ("bos_token_id", 1.5, "the id of a token"),
        ("forced_eos_token_id", [2], "the id of a token"),
        ("bad_words_ids", [7], "lists of ids"),
        ("suppress_tokens", "7", "the ids of tokens"),
        ("num_beams", 0, "a whole number from 1 up"),
        ("num_beams", True, "a whole number from 1 up"),
        ("no_repeat_ngram_size", -1, "a whole number from 0 up"),
        ("min_length", "6", "a whole number from 0 up"),
        ("length_penalty", "long", "a number"),
        ("repetition_penalty", 0, "a number above 0"),
        ("early_stopping", "soon", "true, false or never"),
    ],
)
def test_a_wrong_type_names_file_and_key(key: str, value: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError) as caught:
        _read(tmp_path, {}, {key: value})
    assert str(caught.value) == f"generation_config.json: {key} is {value!r}; expected {expected}"
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(LoadError, match=f"config.json: {key} is "):
        _read(tmp_path, {key: value})


def test_what_is_not_followed_stands_in_one_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = {
        "bad_words_ids": [[7, 8], [9]], "encoder_no_repeat_ngram_size": 3, "encoder_repetition_penalty": 1.1,
        "max_length": 512, "early_stopping": "never", "eos_token_id": [2, 50], "min_length": 4, "of_their_own": 1,
        "num_beam_groups": 1, "diversity_penalty": 0.0, "guidance_scale": None, "use_cache": True,
    }  # fmt: skip
    assert _read(tmp_path, {}, own) == GenerationSpec(eos=(2,), suppressed=(9,))
    (message,) = caplog.messages
    assert caplog.records[0].levelno == logging.WARNING
    left, known = message.split(": not followed where text is generated: ")
    assert left == str(tmp_path)
    assert set(known.split(", ")) >= {
        "encoder_no_repeat_ngram_size 3", "encoder_repetition_penalty 1.1", "max_length 512", "early_stopping 'never'",
        "min_length 4", "of_their_own 1", "of 50 tokens",
    }  # fmt: skip
    assert "bad_words_ids [[7, 8], [9]]" in known and "eos_token_id [2, 50]" in known
    assert not any(key in known for key in ("num_beam_groups", "diversity", "guidance", "use_cache"))


def test_asking_for_drawn_tokens_is_told_with_the_options_that_draw(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _read(tmp_path, {}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}) == GenerationSpec()
    (message,) = caplog.messages
    assert "the likeliest ones are taken unless run is told --temperature 0.6 --top-k 20 --top-p 0.9" in message
    caplog.clear()
    _read(tmp_path, {}, {"do_sample": False, "temperature": 0.6})
    assert not caplog.messages


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=48, eos_token_id=3, bos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, 0)
    return folder


def test_a_prompt_ends_where_its_text_ends(llama: Path) -> None:
    """The tokenizer writes [CLS] text [SEP]."""
    model = load(str(llama))
    assert model.generation == GenerationSpec(eos=(3,), bos=2)
    assert model.text is not None
    ours, theirs = Tokenizer.from_str(model.text.tokenizer), Tokenizer.from_file(str(llama / "tokenizer.json"))
    for text in ("a", "some words", ""):
        assert theirs.encode(text).tokens == [*ours.encode(text).tokens, "[SEP]"]
        assert ours.encode(text).tokens[0] == "[CLS]"


@pytest.mark.parametrize(
    ("config", "begin"),
    [
        ({"add_bos_token": True, "bos_token": "[MASK]"}, ["[MASK]"]),
        ({"add_bos_token": True, "bos_token": {"content": "[CLS]"}}, ["[CLS]"]),
        ({"add_bos_token": False, "bos_token": "[MASK]"}, []),
        ({"add_eos_token": True, "bos_token": "[MASK]"}, []),
    ],
)
def test_tokenizer_config_says_with_what_a_prompt_begins(config: dict[str, Any], begin: list[str]) -> None:
    text = ending_open(TextSpec(tiny_tokenizer(), 32), config)
    assert Tokenizer.from_str(text.tokenizer).encode("ab").tokens == [*begin, "ab"]
    with pytest.raises(LoadError, match=r"bos_token is '<s>', which tokenizer\.json does not have"):
        ending_open(TextSpec(tiny_tokenizer(), 32), {"add_bos_token": True, "bos_token": "<s>"})


def test_a_limit_by_hand_bounds_prompt_and_continuation_together(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(str(llama), max_length=20)
    assert model.cache is not None and model.text is not None
    assert (model.cache.max_length, model.text.max_length) == (20, 20)
    with pytest.raises(LoadError, match="max-length is 1; a text and what follows it have at least 2 tokens"):
        load(str(llama), max_length=1)
    model = load(str(llama))
    assert model.cache is not None and model.text is not None
    assert (model.cache.max_length, model.text.max_length) == (48, 48)
    assert not any("cut" in message for message in caplog.messages)  # no prompt is cut


def test_the_built_in_language_model_says_with_what_it_ends() -> None:
    model = load("lm", weights="random")
    assert model.generation is not None and model.cache is not None and model.text is not None
    tokenizer = Tokenizer.from_str(model.text.tokenizer)
    assert tokenizer.encode("a film").ids[0] == model.generation.bos
    assert tokenizer.encode("a film").ids[-1] not in model.generation.eos


def test_the_text_of_an_artifact_is_that_of_transformers(llama: Path, tmp_path: Path) -> None:
    folder = build(BuildOptions(source=str(llama), output=tmp_path / "built", quantize="none"))
    told = json.loads((folder / "manifest.json").read_text())["generation"]
    assert (told["eos"], told["bos"], told["cache"]["max_length"], told["chat"]) == ([3], 2, 48, None)
    model: Any = transformers.LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(llama / "tokenizer.json"))
    texts = ["some words", "a", "b c d e f g"]
    for text, result in zip(texts, runtime.Model(folder).generate(texts, max_new_tokens=12), strict=True):
        prompt = torch.tensor([tokenizer.encode(text).ids[:-1]])
        ids = model.generate(prompt, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(prompt))[0]
        whole, begun = (tokenizer.decode(part.tolist()) for part in (ids[prompt.shape[1] - 1 :], prompt[0, -1:]))
        assert result["text"] == whole.removeprefix(begun)


# ---- Marian's tokenizer: pieces with known log probabilities

_NORMAL, _UNKNOWN, _CONTROL, _OWN = 1, 2, 3, 4
_PIECES = {
    "<unk>": (0.0, _UNKNOWN), "<s>": (0.0, _CONTROL), "</s>": (0.0, _CONTROL), "▁": (-3.0, _NORMAL),
    "a": (-4.0, _NORMAL), "b": (-4.0, _NORMAL), "▁a": (-5.0, _NORMAL), "ab": (-3.5, _NORMAL), "▁ab": (-6.0, _NORMAL),
    "c": (-5.0, _NORMAL),
}  # fmt: skip
_IDS = {
    "</s>": 0, "<unk>": 1, "▁": 2, "a": 3, "b": 4, "▁a": 5, "ab": 6, "▁ab": 7, "c": 8, "é": 9, "▁é": 10, "abc": 11,
    ">>fra<<": 12, "<pad>": 13,
}  # fmt: skip


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low]) if not rest else bytes([low | 128]) + _varint(rest)


def _field(number: int, value: bytes | float | int) -> bytes:
    """Of a protobuf message."""
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    return _varint(number << 3 | 5) + struct.pack("<f", value) if isinstance(value, float) else _number(number, value)


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _marian(folder: Path, model_type: int = 1, rules: bytes = b"", **ids: int) -> Path:
    pieces = [
        _field(1, piece.encode()) + _field(2, score) + _number(3, kind) for piece, (score, kind) in _PIECES.items()
    ]
    whole = b"".join(_field(1, piece) for piece in pieces) + _field(2, _number(3, model_type)) + _field(3, rules)
    (folder / "source.spm").write_bytes(whole)
    (folder / "vocab.json").write_text(json.dumps(_IDS | ids))
    return folder


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab", ["▁ab"]),  # -6, where ▁ and ab have -6.5, ▁a and b -9
        ("abab", ["▁ab", "ab"]),
        ("abc  c ", ["▁ab", "c", "▁", "c"]),  # not abc, a piece of the other language
        ("bé", ["▁", "b", "é"]),
        ("z", ["▁", "<unk>"]),
        ("zz a", ["▁", "<unk>", "▁a"]),  # letters in a row that nobody knows are one unknown piece
        (">>fra<< ab", [">>fra<<", "▁ab"]),
        ("", []),
    ],
)
def test_the_likeliest_cut_of_a_text_gets_the_ids_of_vocab_json(text: str, pieces: list[str], tmp_path: Path) -> None:
    made = marian_tokenizer(_marian(tmp_path))
    assert made is not None
    assert Tokenizer.from_str(made).encode(text).ids == [_IDS[piece] for piece in [*pieces, "</s>"]]


def test_pieces_of_either_language_are_put_together_to_words(tmp_path: Path) -> None:
    made = marian_tokenizer(_marian(tmp_path))
    assert made is not None
    ids = [_IDS[piece] for piece in ("▁ab", "é", "▁a", "</s>", "<pad>")]
    assert Tokenizer.from_str(made).decode(ids, skip_special_tokens=True) == "abé a"


def test_a_model_that_adds_no_space_before_a_text_gets_none(tmp_path: Path) -> None:
    made = marian_tokenizer(_marian(tmp_path, rules=_number(3, 0)))
    assert made is not None
    assert Tokenizer.from_str(made).encode("ab").tokens == ["ab", "</s>"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"model_type": 2}, "the pieces have no probabilities"), ({"ab": 99}, "the ids are not 0, 1, 2 and so on")],
)
def test_what_no_tokenizer_json_can_hold_is_told(
    change: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert marian_tokenizer(_marian(tmp_path, **change)) is None
    assert caplog.messages[0].endswith(f"no tokenizer.json can be made of source.spm and vocab.json: {reason}")


@pytest.mark.parametrize("damage", [b"\x0a\xff", b"\x0b", b"\x08", b"\xff" * 12, b"\x0a\x03\x0a\x01\xff", b""])
def test_a_damaged_model_is_refused(damage: bytes, tmp_path: Path) -> None:
    _marian(tmp_path)
    (tmp_path / "source.spm").write_bytes(damage + (tmp_path / "source.spm").read_bytes() * bool(damage))
    if damage:
        with pytest.raises(LoadError, match=r"source.spm: not a sentencepiece model that can be read"):
            marian_tokenizer(tmp_path)
    else:
        assert marian_tokenizer(tmp_path) is None
