"""How the shipped language model is trained."""

from __future__ import annotations

from pathlib import Path

from tx_export.models.lm import Lm
from tx_export.training import LoopOptions, Progress, TrainOptions, TrainResult, train

__all__ = ["train_shipped"]

_LOOP = LoopOptions(
    batch_size=16,
    epochs=3,
    warmup=300,
    rate_factor=0.4,  # 2.0e-3 at its highest
    label_smoothing=0.0,
    average=0.998,
    patience=2,
    checkpoint_every=250,
)


def train_shipped(folder: Path, progress: Progress) -> TrainResult:
    """Train on train.txt, stopped by held-out.txt; a run that was stopped is continued from its checkpoint."""
    options = TrainOptions(
        spec=Lm(**Lm.sizes["small"], vocab_size=4096, max_length=256),
        data=folder / "train.txt",
        output=folder / "lm-small",
        held_out=folder / "held-out.txt",
        dropout=0.0,  # a few epochs see too little to learn it by heart
        loop=_LOOP,
    )
    return train(options, progress)
