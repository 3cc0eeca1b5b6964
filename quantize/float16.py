"""float16: half the bytes, and twice the speed on GPUs; what it can't hold stays in float32, each with the reason.

For CUDA and for size. The CPU provider has few float16 kernels: it computes in float32 between casts, slower than fp32.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from tx_export.passes import GraphPass, Left, Outcome
from tx_export.quantize._half import to_half
from tx_export.quantize._half_on_cpu import casts_at_load
from tx_export.quantize._half_types import FLOAT16

__all__ = ["Float16"]


@dataclass(frozen=True)
class Float16(GraphPass):
    """Ranges are measured on calibration text; without any, only the weights are looked at."""

    keep_io: bool = True  # inputs and outputs stay float32

    budget: ClassVar[str | None] = "sqnr_db=40"

    def call(self, model: ir.Model) -> Outcome:
        outcome = to_half(model, FLOAT16, self.keep_io, self.context)
        if not outcome.modified or self.context is None or self.context.provider != "cpu":
            return outcome
        added = casts_at_load(model)
        note = Left(
            "speed on CPUs", f"{added} casts are added at load, around float32 kernels: by those slower than fp32"
        )
        coverage = dataclasses.replace(outcome.coverage, left=(*outcome.coverage.left, note))
        return Outcome(model, True, coverage, subject=outcome.subject)
