"""Rotary positions as config.json tells them: theta, and how the angles are scaled for longer contexts.

transformers 5 writes rope_parameters; older versions rope_theta and rope_scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tx_export.errors import LoadError

__all__ = ["ROPE_KEYS", "read_rope", "rope_scale"]

ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling")
_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_rope(config: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """The fields rope_theta, rope_type and rope_numbers."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise LoadError(f"config.json: rope_parameters is {given!r}; expected rope_type and its numbers")
    kind = str(given.get("rope_type", given.get("type", "default")))
    known = ("rope_type", "type", "rope_theta", *_NUMBERS.get(kind, ()))
    if kind not in _NUMBERS or (unknown := sorted(set(given) - set(known))):
        found = f"the type {kind!r}" if kind not in _NUMBERS else f"{', '.join(unknown)}"
        raise LoadError(f"config.json: rope_parameters has {found}; supported types: {', '.join(_NUMBERS)}")
    theta = given.get("rope_theta", config.get("rope_theta", default_theta))
    numbers = [given.get(name) for name in _NUMBERS[kind]]
    checked = [_positive(*item) for item in zip(("rope_theta", *_NUMBERS[kind]), (theta, *numbers), strict=True)]
    return {"rope_theta": checked[0], "rope_type": kind, "rope_numbers": tuple(checked[1:])}


def _positive(name: str, number: object) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
        raise LoadError(f"config.json: {name} of the rotary positions is {number!r}; expected a number above 0")
    return float(number)


def rope_scale(kind: str, numbers: tuple[float, ...], frequencies: Tensor) -> Tensor:
    """What the frequencies [head_dim / 2] are multiplied by: `llama3` slows the low ones, `linear` all."""
    if kind == "default":
        return torch.ones_like(frequencies)
    if kind == "linear":
        return torch.full_like(frequencies, 1 / numbers[0])
    factor, low, high, original = numbers
    turns = original * frequencies / (2 * math.pi)  # within the context that the model was first trained on
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) / factor + share
