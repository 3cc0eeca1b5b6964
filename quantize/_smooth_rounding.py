"""What 8-bit products see: activations as DynamicQuantizeLinear rounds them, weights with one step for each column."""

from __future__ import annotations

import numpy as np

__all__ = ["column_steps", "rounded_columns", "rounded_rows"]


def rounded_rows(x: np.ndarray) -> np.ndarray:
    """255 steps over a range that contains 0, for the whole tensor."""
    low, high = min(float(x.min(initial=0)), 0.0), max(float(x.max(initial=0)), 0.0)
    step = np.float32((high - low) / 255)
    if step == 0:
        return x
    zero = np.rint(-low / step)
    rounded: np.ndarray = (np.clip(np.rint(x / step) + zero, 0, 255) - zero) * step
    return rounded


def column_steps(weight: np.ndarray) -> np.ndarray:
    """float32 [N], 1 for a column of zeros."""
    steps: np.ndarray = (np.abs(weight).max(axis=0) / 127).astype(np.float32)
    steps[steps == 0] = 1
    return steps


def rounded_columns(weight: np.ndarray) -> np.ndarray:
    steps = column_steps(weight)
    rounded: np.ndarray = np.rint(weight / steps) * steps
    return rounded
