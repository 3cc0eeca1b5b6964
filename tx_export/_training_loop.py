"""The training loop: Adam on the warm-up schedule, early stopping on held-out rows, checkpoints to continue from."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tx_export._training_dropout import ByteDropout
from tx_export._training_steps import LoopOptions, Metrics, evaluate, gradients, warmup_rate
from tx_export._training_text import Rows, epoch_batches
from tx_export.errors import LoadError, TxExportError

__all__ = ["Fitted", "Objective", "Progress", "TrainRecord", "fit", "label_objective", "minimize"]


@dataclass(frozen=True)
class TrainRecord:
    """A step: its number from 1 of how many at most, its loss and rate; held-out metrics when it was judged."""

    step: int
    steps: int
    epoch: int
    loss: float
    learning_rate: float
    held_out: Mapping[str, float] | None = None


Progress = Callable[[TrainRecord], None]


@dataclass(frozen=True)
class Objective:
    """What a loop minimizes: gradients of the chosen rows, whose mean loss is returned, and held-out metrics."""

    lengths: Sequence[int]  # tokens of each row
    gradients: Callable[[nn.Module, Sequence[int]], float]
    judge: Callable[[nn.Module], Metrics]  # `loss`; a share of right answers, if there is one, comes before it


@dataclass
class _State:
    """All that the next step depends on, and the best so far."""

    module: nn.Module
    average: nn.Module | None
    optimizer: torch.optim.Optimizer
    step: int
    best_step: int
    best: Metrics
    best_weights: dict[str, Tensor]
    misses: int  # evaluations since the best

    def dump(self) -> dict[str, Any]:
        return {
            "module": self.module.state_dict(),
            "average": self.average.state_dict() if self.average is not None else {},
            "optimizer": self.optimizer.state_dict(),
            "progress": (self.step, self.best_step, self.misses),
            "best": self.best,
            "best_weights": self.best_weights,
            "rng": torch.get_rng_state(),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        self.module.load_state_dict(saved["module"])
        if self.average is not None:
            self.average.load_state_dict(saved["average"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.best_step, self.misses = saved["progress"]
        self.best, self.best_weights = saved["best"], saved["best_weights"]
        torch.set_rng_state(saved["rng"])


@dataclass(frozen=True)
class Fitted:
    """The weights that did best on the held-out rows, their metrics, their step, and the number of steps run."""

    weights: dict[str, Tensor]
    metrics: Metrics
    best_step: int
    steps: int


def fit(
    module: nn.Module,
    d_model: int,
    rows: tuple[Rows, Rows],
    options: LoopOptions,
    saved: tuple[Path, str],
    progress: Progress,
) -> Fitted:
    """Minimize the smoothed loss of the first rows; the others are held out."""
    return minimize(module, d_model, label_objective(*rows, options), options, saved, progress)


def label_objective(train: Rows, held_out: Rows, options: LoopOptions) -> Objective:
    """The smoothed loss of labelled rows, and accuracy on others."""
    return Objective(
        [len(ids) for ids in train.ids],
        lambda module, chosen: gradients(module, train, chosen, options),
        lambda module: evaluate(module, held_out, options.batch_size),
    )


def minimize(
    module: nn.Module,
    d_model: int,
    objective: Objective,
    options: LoopOptions,
    saved: tuple[Path, str] | None,
    progress: Progress,
) -> Fitted:
    """Train until nothing improves; `saved` is the checkpoint's file and the fingerprint that it must carry, if any.

    Draws from torch's global generator. A checkpoint that is there is continued, to the weights of a run in one go.
    """
    state = _started(module, options)
    if saved is not None and saved[0].exists():
        state.load(_read_checkpoint(*saved))
    per_epoch = -(-len(objective.lengths) // options.batch_size)
    steps, every = options.steps or per_epoch * options.epochs, options.evaluate_every or per_epoch
    batches = epoch_batches(objective.lengths, options.batch_size, options.seed, state.step // per_epoch)
    while state.step < steps and state.misses < options.patience:
        epoch, position = divmod(state.step, per_epoch)
        if position == 0:
            batches = epoch_batches(objective.lengths, options.batch_size, options.seed, epoch)
        rate = warmup_rate(state.step + 1, d_model, options.warmup, options.rate_factor)
        loss = _update(state, objective, batches[position], rate, options)
        judged = _judge(state, objective) if state.step % every == 0 or state.step == steps else None
        progress(TrainRecord(state.step, steps, epoch, loss, rate, judged))
        if saved is not None and (state.step % options.checkpoint_every == 0 or judged is not None):
            _write_checkpoint(*saved, state)
    return Fitted(state.best_weights, state.best, state.best_step, state.step)


def _started(module: nn.Module, options: LoopOptions) -> _State:
    average = copy.deepcopy(module).requires_grad_(False) if options.average > 0 else None
    optimizer = torch.optim.Adam(module.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9)
    module.train()
    return _State(module, average, optimizer, 0, 0, {}, {}, 0)


def _update(state: _State, objective: Objective, chosen: list[int], rate: float, options: LoopOptions) -> float:
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    state.optimizer.zero_grad(set_to_none=True)
    with ByteDropout():
        loss = objective.gradients(state.module, chosen)
    if not math.isfinite(loss):
        raise TxExportError(
            f"step {state.step + 1}: the loss is {loss}; choose a smaller rate factor or a longer warm-up"
        )
    nn.utils.clip_grad_norm_(state.module.parameters(), options.clip, error_if_nonfinite=False)
    state.optimizer.step()
    state.step += 1
    if state.average is not None:
        # Early on the average is short, so that it doesn't remember the random start.
        decay = min(options.average, (1 + state.step) / (10 + state.step))
        with torch.no_grad():
            for kept, weight in zip(state.average.parameters(), state.module.parameters(), strict=True):
                kept.lerp_(weight, 1 - decay)
    return loss


def _judge(state: _State, objective: Objective) -> Metrics:
    judged = state.average if state.average is not None else state.module
    metrics = objective.judge(judged)
    if not state.best or _rank(metrics) > _rank(state.best):
        state.best, state.best_step, state.misses = metrics, state.step, 0
        state.best_weights = _copied(judged.state_dict(keep_vars=True))
    else:
        state.misses += 1
    return metrics


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What shares its memory goes on to share it."""
    copies = {id(weight): weight.detach().clone() for weight in weights.values()}
    return {name: copies[id(weight)] for name, weight in weights.items()}


def _rank(metrics: Metrics) -> tuple[float, float]:
    return metrics.get("exact", metrics.get("accuracy", 0.0)), -metrics["loss"]


def _write_checkpoint(path: Path, fingerprint: str, state: _State) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    torch.save({"fingerprint": fingerprint} | state.dump(), unfinished)
    unfinished.replace(path)


def _read_checkpoint(path: Path, fingerprint: str) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:
        raise LoadError(f"{path}: a damaged checkpoint ({type(error).__name__}); delete it to start again") from error
    if saved.get("fingerprint") != fingerprint:
        raise LoadError(f"{path}: from other options or data; repeat those, delete it, or choose another folder")
    return saved
