"""float16: half the bytes, and twice the speed on GPUs; what it can't hold stays in float32, each with the reason.

For CUDA and for size. The CPU provider has few float16 kernels: it computes in float32 between casts, slower than fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tx_export.quantize._half import HalfPass
from tx_export.quantize._half_types import FLOAT16, Half

__all__ = ["Float16"]


@dataclass(frozen=True)
class Float16(HalfPass):
    """Ranges are measured on calibration text; without any, only the weights are looked at."""

    half: ClassVar[Half] = FLOAT16
    budget: ClassVar[str | None] = "sqnr_db=40"
