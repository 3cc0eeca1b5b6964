"""How logits become scores: what a cross-encoder of sentence-transformers declares, else as pipelines of transformers.

softmax over the labels; a sigmoid for each of several, or for the only one; or the numbers as they are (regression)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tx_export._load_weights import read_json
from tx_export.errors import LoadError
from tx_export.spec import Scores

__all__ = ["is_cross_encoder", "read_scores"]

_ACTIVATIONS: Mapping[str, Scores] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
}
_PROBLEMS: Mapping[str, Scores] = {"multi_label_classification": "sigmoid", "regression": "identity"}


def is_cross_encoder(folder: Path) -> bool:
    """Whether sentence-transformers wrote the folder as a CrossEncoder."""
    return _sentence_config(folder).get("model_type") == "CrossEncoder"


def read_scores(folder: Path, config: Mapping[str, Any], labels: Sequence[str]) -> Scores:
    """Of a classifier with these labels; LoadError for an activation that the runtime does not have."""
    declared = _declared(folder, config)
    if declared is None:
        return _PROBLEMS.get(str(config.get("problem_type")), "sigmoid" if len(labels) == 1 else "softmax")
    scores = _ACTIVATIONS.get(str(declared))
    if scores is None:
        raise LoadError(f"{folder}: activation_fn is {declared!r}; supported: {', '.join(_ACTIVATIONS)}")
    return scores


def _declared(folder: Path, config: Mapping[str, Any]) -> object:
    """The activation in the order in which CrossEncoder looks for it: its own file, config.json, its old key there."""
    inner = config.get("sentence_transformers")
    places = (_sentence_config(folder), inner if isinstance(inner, Mapping) else {})
    named = next((place["activation_fn"] for place in places if place.get("activation_fn")), None)
    return named or config.get("sbert_ce_default_activation_function")


def _sentence_config(folder: Path) -> dict[str, Any]:
    file = folder / "config_sentence_transformers.json"
    return read_json(file) if file.is_file() else {}
