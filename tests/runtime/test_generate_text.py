"""Text as it comes: nothing half, nothing twice, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tx_export.runtime_generate import LimitError, TextStream

_TEXTS = ["the cat sat", "the hat of the cat", "a café at the sea", "naïve tea ☕ the"]
_SAID = "  the cat, ☕ and 🦊🦊: café!\n\nthe end … the 末"


def _byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(_TEXTS, trainer)
    return made


def _pieces() -> tokenizers.Tokenizer:
    """As Llama has it: a mark for spaces, which is lost at the start of a text, and bytes for what has no piece."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    marks = [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(_TEXTS, trainers.BpeTrainer(vocab_size=330, special_tokens=["<unk>", *marks]))
    spaces = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return made


def _word_pieces() -> tokenizers.Tokenizer:
    words = ["[UNK]", "the", "a", "cat", "and", "end", "café", *"!,:…☕🦊末", *(f"##{char}" for char in "abcdefst")]
    made = tokenizers.Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


@pytest.mark.parametrize("make", [_byte_level, _pieces, _word_pieces])
def test_the_parts_are_the_whole_text_whatever_the_tokenizer(make: Callable[[], tokenizers.Tokenizer]) -> None:
    tokenizer = make()
    ids = tokenizer.encode(_SAID, add_special_tokens=False).ids
    for size in (1, 2, 5):
        stream = TextStream(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)), ["no such text"])
        parts = [stream.push(ids[start : start + size]) for start in range(0, len(ids), size)]
        assert not any("\ufffd" in part for part in parts)
        assert "".join([*parts, stream.finish()]) == tokenizer.decode(ids, skip_special_tokens=False)
        assert sum(map(bool, parts)) > len(ids) / size / 3, "text comes as it is known, not at the end"


def _chars(stops: list[str]) -> TextStream:
    """One id for each character."""
    return TextStream(lambda ids: "".join(map(chr, ids)), stops)


def _pushed(stream: TextStream, text: str) -> list[str]:
    return [stream.push([ord(char)]) for char in text]


def test_text_ends_before_the_first_stop_and_nothing_follows() -> None:
    stream = _chars(["END", "\n\n"])
    parts = _pushed(stream, "one\ntwo EEND three\n\nfour")
    assert "".join([*parts, stream.finish()]) == "one\ntwo E"
    assert stream.stopped


def test_what_may_be_the_start_of_a_stop_is_held_back_and_given_when_it_is_not() -> None:
    stream = _chars(["</s>", "<end>"])
    assert _pushed(stream, "a</e</s") == ["a", "", "", "</e", "", "", ""]
    assert (stream.finish(), stream.stopped) == ("</s", False)


def test_the_earliest_of_several_stops_in_one_push_ends_the_text() -> None:
    stream = _chars(["later", "now"])
    assert stream.push([ord(char) for char in "stop now or later"]) == "stop "
    assert (stream.finish(), stream.push([65])) == ("", "")


def test_half_a_character_is_given_at_the_end_if_nothing_completes_it() -> None:
    tokenizer = _byte_level()
    ids = tokenizer.encode("the 🦊", add_special_tokens=False).ids
    stream = TextStream(lambda ids: str(tokenizer.decode(ids)))
    assert "".join(stream.push([token]) for token in ids[:-1]) == "the "
    assert stream.finish() == tokenizer.decode(ids[:-1]).removeprefix("the ")


def test_a_stop_string_that_is_empty_is_refused() -> None:
    with pytest.raises(LimitError, match="stop: an empty text would end every continuation at once"):
        _chars(["x", ""])
