"""GPTQ (Frantar et al. 2022): what rounding a weight changes in the output, those not yet rounded make up for.

Row by row of w, the loudest input first: e = (w_i - q_i) / U_ii, w_j -= U_ij e for j > i, with H^-1 = U^T U, H = X^T X.
"""

from __future__ import annotations

import numpy as np

from tx_export.quantize._smooth_rounding import column_steps

__all__ = ["compensated"]

_BLOCK = 128  # rows between two products with the rest of the weight


def compensated(weight: np.ndarray, hessian: np.ndarray, damping: float) -> np.ndarray:
    """Whole steps of each column, the largest weight at step 127, so that rounding it again changes nothing.

    weight [K, N]; hessian [K, K], the sum of x^T x, not 0; damping, relative to its mean diagonal, limits how far
    weights move.
    """
    diagonal = np.diag(hessian).astype(np.float64)
    order = np.argsort(-diagonal, kind="stable")
    damped = hessian[np.ix_(order, order)] + np.diag(np.full(len(order), damping * diagonal.mean()))
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    steps, rest = column_steps(weight).astype(np.float64), weight[order].astype(np.float64)
    pinned = np.zeros(rest.shape)
    largest = np.abs(rest).argmax(axis=0)[None]
    np.put_along_axis(pinned, largest, np.rint(np.take_along_axis(rest, largest, axis=0) / steps), axis=0)
    for start in range(0, len(rest), _BLOCK):
        block = slice(start, start + _BLOCK)
        errors = _round(rest[block], upper[block, block], steps, pinned[block])
        rest[start + _BLOCK :] -= upper[block, start + _BLOCK :].T @ errors
    rounded = np.empty_like(weight)
    rounded[order] = rest
    return rounded


def _round(rows: np.ndarray, upper: np.ndarray, steps: np.ndarray, pinned: np.ndarray) -> np.ndarray:
    """In place; the errors, each relative to its U_ii."""
    errors = np.empty_like(rows)
    for i, row in enumerate(rows):
        whole = np.where(pinned[i] != 0, pinned[i], np.clip(np.rint(row / steps), -127, 127)) * steps
        errors[i] = (row - whole) / upper[i, i]
        rows[i] = whole
        rows[i + 1 :] -= np.outer(upper[i, i + 1 :], errors[i])
    return errors
