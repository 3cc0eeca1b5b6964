"""One training step: the warm-up schedule, the smoothed loss, and gradients gathered over micro-batches.

rate(step) = factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5)         Vaswani et al. 2017, section 5.3
target     = (1 - smoothing) * label + smoothing / labels                       section 5.4
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tx_export._training_text import SPECIAL_TOKENS, Rows, collate
from tx_export.errors import TxExportError

__all__ = [
    "LoopOptions",
    "Metrics",
    "evaluate",
    "gradients",
    "recomputing",
    "running",
    "smoothed_loss",
    "warmup_rate",
    "with_unknown_words",
]

Metrics = dict[str, float]


@dataclass(frozen=True)
class LoopOptions:
    """How long and how to step; the defaults are the article's."""

    batch_size: int = 32  # examples an update; 32, 64, 128 by size
    accumulation: int = 1  # micro-batches that a batch is cut into
    epochs: int = 20  # at most
    steps: int = 0  # at most; 0: as many as the epochs have
    warmup: int = 4000  # steps until the rate falls
    rate_factor: float = 1.0
    label_smoothing: float = 0.1
    word_dropout: float = 0.0  # share of tokens read as [UNK]
    average: float = (
        0.0  # decay of the moving average of the weights that is judged and kept; 0: the weights themselves
    )
    clip: float = 1.0  # largest norm of the gradient
    precision: Literal["float32", "bfloat16"] = "float32"
    activations: Literal["keep", "recompute"] = "keep"  # recompute: gradient checkpointing, layer by layer
    evaluate_every: int = 0  # steps; 0: once an epoch
    patience: int = 3  # evaluations without a better one before training stops
    checkpoint_every: int = 500  # steps
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation", "epochs", "warmup", "patience", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise TxExportError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.batch_size % self.accumulation:
            raise TxExportError(f"batch_size {self.batch_size} does not divide by accumulation {self.accumulation}")
        for name in ("label_smoothing", "word_dropout", "average"):
            if not 0 <= getattr(self, name) < 1:
                raise TxExportError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        if self.rate_factor <= 0 or self.clip <= 0 or min(self.evaluate_every, self.steps) < 0:
            raise TxExportError("rate_factor and clip must be above 0, evaluate_every and steps at least 0")


def warmup_rate(step: int, d_model: int, warmup: int, factor: float = 1.0) -> float:
    """The learning rate of a step counted from 1 (Vaswani et al. 2017, equation 3)."""
    return float(factor * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5))


def smoothed_loss(
    logits: Tensor, targets: Tensor, smoothing: float, ignore_index: int = -100, confidence: Tensor | None = None
) -> Tensor:
    """Sum of the cross-entropies with smoothed targets over the targets [...] that aren't `ignore_index`.

    `logits` are [..., labels]; `confidence` [...] is the target's probability, the other labels share the rest.
    """
    labels, kept = logits.shape[-1], targets != ignore_index
    log_p = logits[kept].float().log_softmax(dim=-1)  # [N, labels]
    nll, total = -log_p.gather(1, targets[kept][:, None])[:, 0], -log_p.sum(dim=-1)
    if confidence is not None:
        others = (1 - confidence[kept]) / (labels - 1)
        nll = (confidence[kept] - others) * nll + others * total
    return ((1 - smoothing) * nll + smoothing / labels * total).sum()


@contextmanager
def recomputing(module: nn.Module) -> Iterator[None]:
    """Inside, layers of module lists keep only their inputs and run again in the backward pass; same gradients."""
    layers = [layer for stack in module.modules() if isinstance(stack, nn.ModuleList) for layer in stack]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@contextmanager
def running(module: nn.Module, options: LoopOptions) -> Iterator[None]:
    """Inside, the module runs in the precision, and keeps the activations, that the options say."""
    with (
        recomputing(module) if options.activations == "recompute" else nullcontext(),
        torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bfloat16"),
    ):
        yield


def gradients(module: nn.Module, rows: Rows, chosen: Sequence[int], options: LoopOptions) -> float:
    """Add the gradient of the mean loss over the chosen rows, micro-batch by micro-batch; returns that loss."""
    loss = 0.0
    for batch in collate(rows, chosen, options.batch_size // options.accumulation):
        with running(module, options):
            logits = module(with_unknown_words(batch.input_ids, options.word_dropout), batch.attention_mask)
        part = smoothed_loss(logits, batch.targets, options.label_smoothing, confidence=batch.confidence) / len(chosen)
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.item()
    return loss


def with_unknown_words(input_ids: Tensor, share: float) -> Tensor:
    """The ids with a random share of them read as [UNK]; special tokens stay."""
    if share == 0:
        return input_ids
    hidden = (torch.rand(input_ids.shape) < share) & (input_ids >= len(SPECIAL_TOKENS))
    return input_ids.masked_fill(hidden, SPECIAL_TOKENS.index("[UNK]"))


@torch.no_grad()
def evaluate(module: nn.Module, rows: Rows, batch_size: int) -> Metrics:
    """`accuracy` and mean cross-entropy (`loss`, hard labels) in eval mode; the module's mode is put back."""
    training = module.training
    module.eval()
    order = sorted(range(len(rows.ids)), key=lambda i: len(rows.ids[i]))
    right, loss = 0, 0.0
    for batch in collate(rows, order, batch_size):
        logits = module(batch.input_ids, batch.attention_mask)
        right += int((logits.argmax(dim=-1) == batch.targets).sum())
        loss += smoothed_loss(logits, batch.targets, 0.0).item()
    module.train(training)
    return {"accuracy": right / len(order), "loss": loss / len(order)}
