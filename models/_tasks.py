"""The tasks of a Hugging Face encoder: which one a checkpoint is for, its labels or pooling, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from tx_export.errors import LoadError
from tx_export.models._checkpoint import read_labels, read_task
from tx_export.spec import Dim, TensorSpec

__all__ = ["Task", "architectures", "output_of", "read_head"]

Task = Literal["feature-extraction", "text-classification", "token-classification", "fill-mask", "sentence-embedding"]


def architectures(name: str) -> Mapping[str, Task]:
    """The classes of transformers that a family named so in them has, and their tasks."""
    return {
        f"{name}Model": "feature-extraction",
        f"{name}ForSequenceClassification": "text-classification",
        f"{name}ForTokenClassification": "token-classification",
        f"{name}ForMaskedLM": "fill-mask",
    }


def read_head(
    config: Mapping[str, Any], task: str | None, pooling: tuple[str, ...], known: Mapping[str, Task]
) -> dict[str, Any]:
    """The fields head, labels, pooling and normalize, as far as the task has them; `known` are the architectures."""
    tasks: tuple[Task, ...] = get_args(Task)
    head = read_task(config, task or ("sentence-embedding" if pooling else None), known, tasks)
    if head == "sentence-embedding":
        if not pooling:
            raise LoadError(
                "task sentence-embedding needs a sentence-transformers folder (modules.json says how to pool)"
            )
        return {"head": head, "pooling": pooling[0], "normalize": "normalize" in pooling}
    return {"head": head, "labels": read_labels(config) if head.endswith("classification") else ()}


def output_of(task: Task, max_tokens: int, hidden_size: int, labels: int, vocab_size: int) -> TensorSpec:
    """last_hidden_state, embedding or logits."""
    batch, tokens = Dim("batch"), Dim("tokens", max_tokens)
    named: dict[Task, tuple[str, tuple[int | Dim, ...]]] = {
        "feature-extraction": ("last_hidden_state", (batch, tokens, hidden_size)),
        "text-classification": ("logits", (batch, labels)),
        "token-classification": ("logits", (batch, tokens, labels)),
        "fill-mask": ("logits", (batch, tokens, vocab_size)),
        "sentence-embedding": ("embedding", (batch, hidden_size)),
    }
    name, dims = named[task]
    return TensorSpec(name, "float32", dims)
