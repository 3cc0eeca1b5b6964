"""Where eager's own float32 is far from its float64, fidelity allows so much; nothing else becomes looser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from tx_export.errors import BudgetError
from tx_export.testing import eager_model
from tx_export.verify import Judge, eager_runner

Array = NDArray[Any]


class _Cancelling(nn.Module):
    """x, whose first channel loses digits on the way: a float32 near 8,000 has steps of 4.9e-4."""

    large: torch.Tensor

    def __init__(self, large: float) -> None:
        super().__init__()
        self.register_buffer("large", torch.zeros(300).index_fill(0, torch.tensor([0]), large))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.large) - self.large


_INPUTS, _OUTPUTS = ["x:float32[batch,300]{1..2}"], ["y:float32[batch,300]"]


def _wrong(feeds: Mapping[str, Array], error: float) -> dict[str, Array]:
    return {"y": (feeds["x"] * np.float32(1 + error)).astype(np.float32)}


def test_another_rounding_passes_where_eagers_own_is_as_large_and_a_fault_does_not() -> None:
    model = eager_model(_Cancelling(8e3), _INPUTS, _OUTPUTS)  # own rounding: up to 2.4e-4, half a step
    Judge(model).check_exact("export", lambda feeds: {"y": feeds["x"]})
    with pytest.raises(BudgetError, match=r"export: output 'y' is off by"):
        Judge(model).check_exact("export", lambda feeds: _wrong(feeds, 3e-3))  # more than five times as much


def test_without_rounding_of_its_own_the_bound_is_that_of_fp32() -> None:
    model = eager_model(_Cancelling(0.0), _INPUTS, _OUTPUTS)
    Judge(model).check_exact("export", eager_runner(model))
    with pytest.raises(BudgetError, match=r"export: output 'y' is off by"):
        Judge(model).check_exact("export", lambda feeds: _wrong(feeds, 1.5e-4))
