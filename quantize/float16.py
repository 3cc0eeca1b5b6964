"""float16: half the bytes, and twice the speed on GPUs; what it can't hold stays in float32, each with the reason.

For CUDA and for size. The CPU provider has few float16 kernels: it computes in float32 between casts, slower than fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from tx_export.passes import GraphPass, Outcome
from tx_export.quantize._half import to_half
from tx_export.quantize._half_types import FLOAT16

__all__ = ["Float16"]


@dataclass(frozen=True)
class Float16(GraphPass):
    """Ranges are measured on calibration text; without any, only the weights are looked at."""

    keep_io: bool = True  # inputs and outputs stay float32
    keep: str = ""  # outputs of the nodes that stay, with | between them, or `none`; empty: decided by ranges and rules

    budget: ClassVar[str | None] = "sqnr_db=40"

    def call(self, model: ir.Model) -> Outcome:
        return to_half(model, FLOAT16, self.keep_io, self.keep, self.context)
