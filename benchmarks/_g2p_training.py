"""How the shipped word-to-phonemes model is trained."""

from __future__ import annotations

from pathlib import Path

from tx_export.models.seq2seq import Seq2seq
from tx_export.training import LoopOptions, Progress, TrainOptions, TrainResult, train

__all__ = ["train_shipped"]

_LOOP = LoopOptions(
    batch_size=128,
    epochs=12,
    warmup=400,
    rate_factor=0.4,  # 1.8e-3 at its highest
    average=0.999,
    checkpoint_every=250,
)


def train_shipped(folder: Path, progress: Progress) -> TrainResult:
    """Train on train.tsv, stopped by held-out.tsv; a run that was stopped is continued from its checkpoint."""
    options = TrainOptions(
        spec=Seq2seq(**Seq2seq.sizes["small"], max_length=64, norm="pre"),
        data=folder / "train.tsv",
        output=folder / "seq2seq-small",
        held_out=folder / "held-out.tsv",
        tokenizer=folder / "tokenizer.json",
        dropout=0.0,  # a few epochs see too little to learn it by heart
        loop=_LOOP,
    )
    return train(options, progress)
