"""Weights in blocks along K: w = scale (q - zero), q of 4 or 8 bits, a scale and a zero point for each block.

`half_quadratic` follows HQQ (Badri and Shaji, 2023): the error that remains is split into a sparse part, by the
shrinkage of the norm |.|^0.7, and a rest that scale and zero point take up in closed form.

`weighted` counts an error as often as its input is loud, which few of them are by far (AWQ, Lin et al. 2023): of scales
from the widest range down the best, each refitted in closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["METHODS", "Blocks", "quantize", "stored_bytes"]

Array = NDArray[Any]
Levels = tuple[Array, Array]  # scale float32 [N, blocks, 1] and zero point float32 [N, blocks, 1]

_CHUNK = 1 << 20  # elements that are worked on at a time: tables can have gigabytes
_LEAST = np.finfo(np.float32).tiny  # so small that a block of zeros adds nothing, however the kernel sums
_STEPS = 5  # 20 find another 0.05 dB
_RANGES = np.linspace(1.2, 0.7, 11)  # of the widest, in which `weighted` looks
_QUIET = 0.05  # of the mean of a block, what counts of an input that the text left silent
_NORM, _BETA, _GROWTH = 0.7, 10.0, 1.01  # as in HQQ, with errors in units of the scale


@dataclass(frozen=True)
class Blocks:
    """As MatMulNBits and GatherBlockQuantized store them: 4-bit values in pairs, the first in the low half."""

    values: Array  # uint8 [N, blocks, block_size * bits / 8]
    scale: Array  # float32 [N, blocks]
    zero: Array | None  # uint8 [N, blocks * bits / 8, rounded up]; None stands for the middle, 8 or 128

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.values, self.scale, self.zero) if array is not None)


def stored_bytes(shape: tuple[int, ...], bits: int, block_size: int, symmetric: bool) -> int:
    """What `Blocks` of a weight [N, K] take."""
    rows, blocks = shape[0], -(-shape[1] // block_size)
    return rows * (blocks * (block_size * bits // 8 + 4) + (0 if symmetric else -(-blocks * bits // 8)))


def quantize(
    weight: Array, bits: int, block_size: int, symmetric: bool, method: str, loudness: Array | None = None
) -> Blocks:
    """Of a float32 weight [N, K]; the last block is filled up with zeros. Without loudness [K], `weighted` is `hqq`."""
    rows = max(1, _CHUNK // max(1, weight.shape[1]))
    find = METHODS["hqq" if method == "weighted" and loudness is None else method]
    loud = _loud_blocks(np.ones(weight.shape[1]) if loudness is None else loudness, block_size)
    parts = [
        _part(weight[i : i + rows], bits, block_size, lambda w: find(w, bits, symmetric, loud))
        for i in range(0, len(weight), rows)
    ]
    values, scale, zero = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Blocks(values, scale, None if symmetric else zero)


def _loud_blocks(loudness: Array, block_size: int) -> Array:
    """Float32 [1, blocks, block_size], of mean 1 in each block but for the padding."""
    blocks = -(-len(loudness) // block_size)
    padded: Array = np.zeros((1, blocks, block_size))
    padded.reshape(-1)[: len(loudness)] = loudness
    mean = padded.mean(axis=-1, keepdims=True)
    loud: Array = (padded / np.where(mean > 0, mean, 1) + _QUIET).astype(np.float32)
    return loud


def _part(weight: Array, bits: int, block_size: int, find: Callable[[Array], Levels]) -> tuple[Array, Array, Array]:
    blocks = -(-weight.shape[1] // block_size)
    blocked = np.zeros((len(weight), blocks * block_size), np.float32)
    blocked[:, : weight.shape[1]] = weight
    blocked = blocked.reshape(len(weight), blocks, block_size)
    scale, zero = find(blocked)
    values = _nearest(blocked, (scale, zero), bits).astype(np.uint8)
    return _packed(values, bits), scale[..., 0], _packed(zero[..., 0].astype(np.uint8), bits)


def _packed(values: Array, bits: int) -> Array:
    """Pairs of 4-bit values along the last axis, which is filled up to an even length."""
    if bits == 8:
        return values
    even = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, values.shape[-1] % 2)])
    pairs: Array = even[..., ::2] | even[..., 1::2] << 4
    return pairs


def _nearest(w: Array, levels: Levels, bits: int) -> Array:
    scale, zero = levels
    nearest: Array = np.clip(np.rint(w / scale + zero), 0, 2**bits - 1)
    return nearest


def _range(w: Array, bits: int, symmetric: bool) -> Levels:
    """The least scale at which no weight is cut off; 0 is always a level.

    Symmetric levels reach one step further below the middle: a scale below 0 turns them where weights reach higher.
    """
    low, high = np.minimum(w.min(-1, keepdims=True), 0), np.maximum(w.max(-1, keepdims=True), 0)
    if symmetric:
        middle = 2 ** (bits - 1)
        far, near = np.maximum(high, -low), np.minimum(high, -low)
        scale = np.maximum(np.maximum(far / middle, near / (middle - 1)), _LEAST)
        return np.where(high > -low, -scale, scale), np.full_like(scale, middle)
    scale = np.maximum(high / (2**bits - 1) - low / (2**bits - 1), _LEAST)
    return scale, np.rint(-low / scale)


def _half_quadratic(w: Array, bits: int, symmetric: bool) -> Levels:
    """Of all steps the best for each block by its squared error, so none is worse than `_range`."""
    unit, zero = _range(w, bits, symmetric)
    w = w / unit  # so that no square is too large or too small for float32
    levels = best = np.ones_like(unit), zero
    least = _squared_error(w, best, bits)
    for step in range(_STEPS):
        levels = _refitted(w, levels, bits, symmetric, _BETA * _GROWTH**step)
        error = _squared_error(w, levels, bits)
        better = error < least
        best = np.where(better, levels[0], best[0]), np.where(better, levels[1], best[1])
        least = np.where(better, error, least)
    return np.copysign(np.maximum(np.abs(best[0] * unit), _LEAST), unit), best[1]


def _refitted(w: Array, levels: Levels, bits: int, symmetric: bool, beta: float) -> Levels:
    scale, zero = levels
    q = _nearest(w, levels, bits)
    error = w / scale - (q - zero)
    size = np.maximum(np.abs(error), 1e-6)
    target = w / scale - np.sign(error) * np.maximum(size - size ** (_NORM - 1) / beta, 0)
    if not symmetric:
        zero = np.clip(np.rint((q - target).mean(-1, keepdims=True)), 0, 2**bits - 1)
    levels_squared = ((q - zero) ** 2).sum(-1, keepdims=True)
    ratio = (target * (q - zero)).sum(-1, keepdims=True) / np.maximum(levels_squared, 1)
    return (scale * np.where(ratio > 0, ratio, 1)).astype(np.float32), zero.astype(np.float32)


def _squared_error(w: Array, levels: Levels, bits: int, loud: Array | float = 1.0) -> Array:
    scale, zero = levels
    squared: Array = (loud * (scale * (_nearest(w, levels, bits) - zero) - w) ** 2).sum(-1, keepdims=True)
    return squared


def _weighted(w: Array, bits: int, symmetric: bool, loud: Array) -> Levels:
    """Of all candidates the best for each block by its weighted squared error, so none is worse than `_range`."""
    unit, zero = _range(w, bits, symmetric)
    w = w / unit  # so that no square is too large or too small for float32
    best = np.ones_like(unit), zero
    least = _squared_error(w, best, bits, loud)
    for factor in _RANGES:
        for sign in (1, -1) if symmetric else (1,):
            levels = _fitted(w, (np.full_like(unit, sign * factor), zero), bits, symmetric, loud)
            error = _squared_error(w, levels, bits, loud)
            better = error < least
            best = np.where(better, levels[0], best[0]), np.where(better, levels[1], best[1])
            least = np.where(better, error, least)
    scale = best[0] * unit
    return np.copysign(np.maximum(np.abs(scale), _LEAST), scale), best[1]


def _fitted(w: Array, levels: Levels, bits: int, symmetric: bool, loud: Array) -> Levels:
    """The scale, and a zero point unless symmetric, with the least weighted error for what the levels round to."""
    scale, zero = levels
    if not symmetric:
        zero = np.clip(np.rint(zero / scale), 0, 2**bits - 1)
    q = _nearest(w, (scale, zero), bits) - zero
    squares = (loud * q * q).sum(-1, keepdims=True)
    fitted = (loud * w * q).sum(-1, keepdims=True) / np.maximum(squares, _LEAST)
    return np.where(fitted * scale > 0, fitted, scale).astype(np.float32), zero.astype(np.float32)


METHODS: dict[str, Callable[[Array, int, bool, Array], Levels]] = {
    "round": lambda w, bits, symmetric, loud: _range(w, bits, symmetric),
    "hqq": lambda w, bits, symmetric, loud: _half_quadratic(w, bits, symmetric),
    "weighted": _weighted,
}
