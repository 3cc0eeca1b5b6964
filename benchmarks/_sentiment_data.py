"""The sentiment data: fetched, split, written as files of label<TAB>text; and text without labels made of them."""

from __future__ import annotations

import io
import math
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["fetch_corpora", "lexicon", "prepare_files"]

_PACKAGE = "vadersentiment==3.3.2"
_INNER = "additional_resources/hutto_ICWSM_2014.tar.gz"
_RAW = "hutto_ICWSM_2014"
_CORPORA = {
    "movie": "movieReviewSnippets_GroundTruth.txt",
    "tweets": "tweets_GroundTruth.txt",
    "amazon": "amazonReviewSnippets_GroundTruth.txt",
    "news": "nytEditorialSnippets_GroundTruth.txt",
}
_LEXICON = "vader_sentiment_lexicon.txt"


@dataclass(frozen=True)
class Scored:
    """A sentence and its mean human score, -4 to 4."""

    text: str
    score: float

    @property
    def label(self) -> str:
        return "positive" if self.score > 0 else "negative"

    @property
    def line(self) -> str:
        """Label, text, and how sure the label is: 0.73 at score 0.5, 0.88 at 1, 0.98 at 2."""
        return f"{self.label}\t{self.text}\t{1 / (1 + math.exp(-2 * abs(self.score))):.4f}"

    @property
    def key(self) -> str:
        """What two sentences that count as the same have in common: letters and digits, lower case."""
        return "".join(character for character in self.text.lower() if character.isalnum())


def fetch_corpora(folder: Path) -> None:
    """Download the source package that holds the corpora, and unpack them."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["download", "--quiet", "--no-deps", "--no-binary", "vadersentiment", "--dest", str(folder), _PACKAGE]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    (archive,) = folder.glob("vader*.tar.gz")
    with tarfile.open(archive) as outer:
        (member,) = [name for name in outer.getnames() if name.endswith(_INNER)]
        inner = outer.extractfile(member)
        assert inner is not None
        with tarfile.open(fileobj=io.BytesIO(inner.read())) as unpacked:
            unpacked.extractall(folder, filter="data")


def prepare_files(folder: Path) -> dict[str, int]:
    """Write the files; returns how many sentences are untested, held out and tested."""
    corpora = {name: list(_distinct(_read(folder / _RAW / file))) for name, file in _CORPORA.items()}
    movie = [row for row in corpora["movie"] if abs(row.score) >= 0.5]
    random.Random(0).shuffle(movie)
    test, rest = movie[: len(movie) // 5], movie[len(movie) // 5 :]
    held_out, train = rest[: len(rest) // 10], rest[len(rest) // 10 :]
    neutral = [row for row in corpora["movie"] if abs(row.score) < 0.5]
    tested = {row.key for row in test + held_out}
    parts = [train, neutral, corpora["tweets"], corpora["amazon"], corpora["news"], list(lexicon(folder))]
    untested = [[row for row in part if row.key not in tested] for part in parts]
    _write(folder / "movie.train.tsv", (f"{row.label}\t{row.text}" for row in rest))
    _write(folder / "movie.test.tsv", (f"{row.label}\t{row.text}" for row in test))
    _write(folder / "held-out.tsv", (f"{row.label}\t{row.text}" for row in held_out))
    _write(folder / "all.tsv", (row.line for part in untested for row in part))
    _write(folder / "train.tsv", (row.line for part in (*untested[:4], untested[5]) for row in part))
    more = [*(row.text for row in untested[4]), *_recombined([row.text for row in untested[0] + untested[1]])]
    _write(folder / "more.txt", dict.fromkeys(text for text in more if Scored(text, 0.0).key not in tested))
    return {"untested": sum(map(len, untested)), "held out": len(held_out), "tested": len(test)}


def _read(path: Path) -> Iterator[Scored]:
    for line in path.read_text(encoding="utf-8").strip().split("\n"):
        _, score, text = line.split("\t", 2)
        yield Scored(" ".join(text.split()), float(score))


def lexicon(folder: Path) -> Iterator[Scored]:
    """The words of the lexicon with their scores."""
    for line in (folder / _RAW / _LEXICON).read_text(encoding="latin-1").strip().split("\n"):
        word, score = line.split("\t")[:2]
        yield Scored(word, float(score))


def _distinct(rows: Iterable[Scored]) -> Iterator[Scored]:
    seen: set[str] = set()
    for row in rows:
        if row.key and row.key not in seen:
            seen.add(row.key)
            yield row


def _recombined(texts: Sequence[str]) -> Iterator[str]:
    """The beginning of each text with the end of another one."""
    chance = random.Random(0)
    for text in texts:
        beginning, end = text.split(), chance.choice(texts).split()
        yield " ".join(beginning[: (len(beginning) + 1) // 2] + end[len(end) // 2 :])


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
