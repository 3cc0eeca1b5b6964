"""Blocks with standard operators only: what is stored stays, and means the same."""

from __future__ import annotations

import numpy as np
import pytest

from tx_export.optimize.lower_contrib import LowerContrib

from .blocks import arithmetic_bound, quantize, unpacked
from .graphs import graph, normal, run


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("width", [64, 33, 96])
def test_lowered_blocks_compute_what_is_stored(bits: int, symmetric: bool, width: int) -> None:
    body = "x = Gather (table, ids) t = Transpose <perm = [1, 0]> (table) p = MatMul (x, t) z = Gemm (x, w, bias)"
    weights = {"table": normal(200, width), "w": normal(width, 40, seed=1), "bias": normal(40, seed=2)}
    outputs = f"float[n, {width}] x, float[n, 200] p, float[n, 40] z"
    model = graph("int64[n] ids", outputs, weights, body)
    assert quantize(model, bits=bits, symmetric=symmetric).coverage.done == 3
    (table, second), ids = unpacked(model), np.array([0, 7, 199])
    stored = {name for name in model.graph.initializers if name.endswith((f".int{bits}", ".scale", ".zero"))}
    assert LowerContrib()(model).modified
    assert {node.domain for node in model.graph} == {""} and "com.microsoft" not in model.opset_imports
    assert stored <= set(model.graph.initializers)
    found = run(model, {"ids": ids})
    # Reference: NumPy with the stored weights; (q - zero) scale has one rounding.
    assert (np.abs(found["x"] - table[ids]) <= 1.2e-7 * np.abs(table[ids])).all()
    x = found["x"].astype(np.float64)
    assert (np.abs(found["p"] - x @ table.T) <= arithmetic_bound(x, table.T, None)).all()
    bound = arithmetic_bound(x, second.T, None) + 1e-6 * np.abs(weights["bias"])
    assert (np.abs(found["z"] - (x @ second.T + weights["bias"])) <= bound).all()
