"""ModernBERT's own keys of config.json: which layers attend to all tokens, and the theta of their rotary positions.

transformers 5 writes layer_types and rope_parameters; older versions global_attn_every_n_layers and two thetas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tx_export.errors import LoadError

__all__ = ["FULL", "SLIDING", "read_layer_types", "read_theta", "without_own_keys"]

FULL, SLIDING = "full_attention", "sliding_attention"

_OLD_THETAS = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}
_READ = ("layer_types", "global_attn_every_n_layers", "rope_parameters", *_OLD_THETAS.values())
# How the weights started, how a loss is computed and how attention runs elsewhere; layer_norm_eps was never read.
_HARMLESS = (
    *("initializer_cutoff_factor", "sparse_prediction", "sparse_pred_ignore_index", "repad_logits_with_grad"),
    *("deterministic_flash_attn", "reference_compile", "layer_norm_eps"),
)


def without_own_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is left for the other readers."""
    return {key: value for key, value in config.items() if key not in (*_READ, *_HARMLESS)}


def read_layer_types(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """full_attention or sliding_attention for each layer."""
    types, every = config.get("layer_types"), config.get("global_attn_every_n_layers", 3)
    if types is None:
        if not isinstance(every, int) or every < 1:
            raise LoadError(f"config.json: global_attn_every_n_layers is {every!r}; it must be at least 1")
        return tuple(SLIDING if index % every else FULL for index in range(layers))
    if not isinstance(types, list) or len(types) != layers or not all(kind in (FULL, SLIDING) for kind in types):
        raise LoadError(f"config.json: layer_types is {types!r}; supported: {FULL} or {SLIDING} for each of {layers}")
    return tuple(types)


def read_theta(config: Mapping[str, Any], kind: str, default: float) -> float:
    """Of the layers of this kind."""
    by_kind = config.get("rope_parameters") or {}
    if not isinstance(by_kind, dict) or (unknown := sorted(set(by_kind) - {FULL, SLIDING})):
        found = unknown if isinstance(by_kind, dict) else by_kind
        raise LoadError(f"config.json: rope_parameters holds {found!r}; supported: {FULL} and {SLIDING}")
    parameters = by_kind.get(kind) or {}
    changed = {key: value for key, value in parameters.items() if key not in ("rope_theta", "rope_type")}
    if changed or parameters.get("rope_type", "default") != "default":
        raise LoadError(
            f"config.json: rope_parameters.{kind} is {parameters!r}; supported: rope_theta, with rope_type 'default'"
        )
    theta = parameters.get("rope_theta", config.get(_OLD_THETAS[kind], default))
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < float("inf"):
        raise LoadError(f"config.json: the rope theta of {kind} is {theta!r}; expected a number above 0")
    return float(theta)
