"""bfloat16: half the bytes and the range of float32, with 8 bits of mantissa; for GPUs.

The CPU provider has no bfloat16 arithmetic: a build for cpu is refused, and one for cuda is verified by an emulation
that rounds every weight and result to bfloat16 and computes in float32, as a GPU's matrix units do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from tx_export.errors import PassError
from tx_export.passes import Outcome
from tx_export.quantize._half import HalfPass
from tx_export.quantize._half_types import BFLOAT16, Half

__all__ = ["Bfloat16"]


@dataclass(frozen=True)
class Bfloat16(HalfPass):
    """As float16, with nothing out of range but infinities."""

    half: ClassVar[Half] = BFLOAT16
    budget: ClassVar[str | None] = "sqnr_db=22"  # 18 dB, three bits, fewer than float16

    def __post_init__(self) -> None:
        if not self.keep_io:
            raise ValueError("keep_io=false: NumPy has no bfloat16, so run.py could neither feed nor read such arrays")

    def call(self, model: ir.Model) -> Outcome:
        if self.context is not None and self.context.provider == "cpu":
            raise PassError(
                "bfloat16: ONNX Runtime's CPU provider has no bfloat16 arithmetic, so the file would not load; "
                "build for --provider cuda, or take float16 or dynamic_int8"
            )
        return super().call(model)
