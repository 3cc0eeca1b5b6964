"""Where the division by scales goes: into constants that stand there anyway, or one Mul, and never to other readers."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from tx_export.metrics import fidelity_bound
from tx_export.passes import Outcome
from tx_export.quantize.smooth import Smooth

from .graphs import Array, graph, normal, operators, quantize, run

_K = 12
_SCALES = "w:3*9/5+7*4"  # channels 3, 5, 7 by 4.76, 2, 2
_WEIGHTS = {"w": normal(_K, 8), "u": normal(_K, _K, seed=1), "v": normal(_K, 2 * _K, seed=2)} | {
    name: normal(_K, seed=seed) for seed, name in enumerate(("gamma", "beta", "bias", "other"), start=3)
}
_BATCHED = f"float[b, t, {_K}] x, int32[b, t] mask"
_ROWS = f"float[n, {_K}] x, float[n, {_K}] z"

# By what makes the value that the product reads: the inputs, and the nodes in front of the product.
_FOLDED = {
    "a norm": (_ROWS, "h = LayerNormalization (x, gamma, beta)"),
    "a norm without bias": (_ROWS, "h = LayerNormalization (x, gamma)"),
    "a norm whose weight another reads": (
        _ROWS,
        "h = LayerNormalization (x, gamma, beta) o = LayerNormalization (z, gamma, beta)",
    ),
    "a norm whose weight is its bias": (_ROWS, "h = LayerNormalization (x, gamma, gamma)"),
    "a residual norm": (_BATCHED, "h = com.microsoft.SkipLayerNormalization (x, x, gamma, beta, bias)"),
    "a root mean square norm": (_ROWS, "h = SimplifiedLayerNormalization <axis = -1> (x, gamma)"),
    "a residual root mean square norm": (
        _BATCHED,
        "h = com.microsoft.SkipSimplifiedLayerNormalization (x, x, gamma, bias)",
    ),
    "a linear layer": (_ROWS, "p = MatMul (x, u) h = Add (p, bias)"),
    "a linear layer without bias": (_ROWS, "h = MatMul (x, u)"),
    "a turned linear layer": (_ROWS, "t = Transpose <perm = [1, 0]> (u) p = MatMul (x, t) h = Add (bias, p)"),
    "a Gemm": (_ROWS, "h = Gemm (x, u, bias)"),
    "a Gemm with transB": (_ROWS, "h = Gemm <transB = 1> (x, u, bias)"),
    "ReLU behind a linear layer": (_ROWS, "p = Gemm (x, u, bias) h = Relu (p)"),
    "a scalar factor": (_ROWS, "s = Sigmoid (x) h = Mul (half, s)"),
    "a gate": (_ROWS, "p = MatMul (x, u) s = Sigmoid (z) h = Mul (s, p)"),
    "a quotient": (_ROWS, "p = Mul (x, gamma) s = Exp (z) h = Div (p, s)"),
    "a sum of two": (_ROWS, "p = Gemm (x, u) q = LayerNormalization (z, gamma, beta) h = Add (p, q)"),
    "a part of a linear layer": (
        _ROWS,
        "p = MatMul (x, v) a, c = Split <axis = -1> (p, sizes) s = Sigmoid (a) h = Mul (s, c)",
    ),
    "packed attention": (_BATCHED, "h = com.microsoft.Attention <num_heads = 3> (x, qkv, qkv_bias, mask)"),
    "attention": (
        _BATCHED,
        "p = MatMul (x, u) h = com.microsoft.MultiHeadAttention <num_heads = 3> (x, x, p, , mask)",
    ),
}

_KEPT = {
    "an input of the graph": (_ROWS, "h = Identity (x)"),
    "a norm that a residual reads": (_ROWS, "h = LayerNormalization (x, gamma, beta) o = Add (h, x)"),
    "an activation": (_ROWS, "p = MatMul (x, u) h = Sigmoid (p)"),
    "a square": (_ROWS, "p = MatMul (x, u) h = Mul (p, p)"),
    "twice a value": (_ROWS, "p = MatMul (x, u) h = Add (p, p)"),
    "a sum with something else": (_ROWS, "p = MatMul (x, u) h = Add (p, z)"),
    "a linear layer whose weight is tied": (_ROWS, "h = MatMul (x, u) o = MatMul (z, u)"),
    "a linear layer that another reads": (_ROWS, "p = MatMul (x, u) h = Relu (p) o = Neg (p)"),
    "attention whose values are its keys": (
        _BATCHED,
        "p = MatMul (x, u) h = com.microsoft.MultiHeadAttention <num_heads = 3> (x, p, p, , mask)",
    ),
}


def smooth(model: ir.Model, scales: str = _SCALES, only: str = "") -> Outcome:
    outcome = Smooth(scales=scales, only=only)(model)
    assert isinstance(outcome, Outcome)
    return outcome


def product_behind(inputs: str, nodes: str, extra: str = "") -> ir.Model:
    """The given nodes make h, and what else is named o is an output too."""
    weights = _WEIGHTS | {"half": np.array(0.5, np.float32), "sizes": np.array([_K, _K])}
    weights |= {"qkv": normal(_K, 3 * _K, seed=9) * np.float32(0.3), "qkv_bias": normal(3 * _K, seed=10)}
    names = f"{nodes} ".replace("(", " ").replace(")", " ").replace(",", " ").split()
    used = {name: array for name, array in weights.items() if name in names or name == "w"}
    dims = "b, t" if inputs is _BATCHED else "n"
    other = f", float[{dims}, {_K}] o" if " o = " in f" {nodes}" else ""
    model = graph(inputs, f"float[{dims}, 8] y{other}", used, f"{nodes} y = MatMul (h, w) {extra}")
    for node in model.graph:
        for value in node.outputs:
            _describe(value, dims)
    return model


def _describe(value: ir.Value, dims: str) -> None:
    """What shape inference would find: every value here is as wide as the model, but for p that is cut in two."""
    if value.is_graph_output():
        return
    node = value.producer()
    widest = 2 * _K if node is not None and any(each is not None and each.name == "v" for each in node.inputs) else _K
    value.shape, value.dtype = ir.Shape([*dims.split(", "), widest]), ir.DataType.FLOAT
    if node is not None and node.op_type == "Transpose":
        value.shape = ir.Shape([_K, _K])


def feeds_of(inputs: str, mask: Array | None = None) -> dict[str, Array]:
    if inputs is _ROWS:
        return {"x": normal(9, _K, seed=20), "z": normal(9, _K, seed=21)}
    mask = np.array([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1]], np.int32) if mask is None else mask
    return {"x": normal(*mask.shape, _K, seed=20), "mask": mask}


def assert_equal_meaning(model: ir.Model, expected: dict[str, Array], feeds: dict[str, Array]) -> None:
    """Reference: the graph before the pass, within the bound of fp32, where it is finite."""
    found = run(model, feeds)
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert np.abs(found[name] - array).max() <= fidelity_bound(float(np.abs(array).max()))


@pytest.mark.parametrize("form", _FOLDED)
def test_what_makes_the_value_divides_it_and_no_node_is_added(form: str) -> None:
    inputs, nodes = _FOLDED[form]
    model, feeds = product_behind(inputs, nodes), feeds_of(inputs)
    before, expected = operators(model), run(model, feeds)
    outcome = smooth(model)
    assert (outcome.modified, outcome.coverage.done) == (True, 1)
    assert operators(model) == before
    assert_equal_meaning(model, expected, feeds)
    # The product reads channel 3 divided by 2^(9/4), and only its row of the weight took the scale.
    weight = model.graph.initializers["w"].const_value
    assert weight is not None
    ratio = weight.numpy() / _WEIGHTS["w"]
    assert np.allclose(ratio[[3, 5, 7]].T, [2**2.25, 2, 2], rtol=1e-6)
    assert (np.delete(ratio, [3, 5, 7], axis=0) == 1).all()


@pytest.mark.parametrize("form", _KEPT)
def test_b131_one_mul_divides_what_others_read_too_or_nothing_is_linear_in(form: str) -> None:
    inputs, nodes = _KEPT[form]
    model, feeds = product_behind(inputs, nodes), feeds_of(inputs)
    before, expected = operators(model), run(model, feeds)
    outcome = smooth(model)
    assert (outcome.modified, outcome.coverage.done) == (True, 1)
    assert sorted(operators(model)) == sorted([*before, "Mul"])
    assert_equal_meaning(model, expected, feeds)


@pytest.mark.parametrize("kind", ["full", "right", "left", "holed", "one"])
@pytest.mark.parametrize("rows", [1, 3])
def test_values_folded_into_packed_attention_mean_the_same_for_every_mask(kind: str, rows: int) -> None:
    masks = {"full": [1] * 6, "right": [1] * 4 + [0] * 2, "left": [0] * 2 + [1] * 4, "holed": [1, 0] * 3, "one": [1]}
    mask = np.ones((rows, 6), np.int32)
    mask[-1] = [*masks[kind], *[0] * 6][:6]
    inputs, nodes = _FOLDED["packed attention"]
    model, feeds = product_behind(inputs, nodes), feeds_of(inputs, mask)
    expected = run(model, feeds)
    smooth(model)
    assert "Mul" not in operators(model)
    assert_equal_meaning(model, expected, feeds)


def test_products_that_read_one_value_share_one_mul_and_one_quantization() -> None:
    weights = {"w": normal(_K, 8), "u": normal(_K, 4, seed=1), "v": normal(_K, 4, seed=2)}
    body = "h = Neg (x) y = MatMul (h, w) a = MatMul (h, u) o = MatMul (h, v) r = Sigmoid (h)"
    outputs = f"float[n, 8] y, float[n, 4] a, float[n, 4] o, float[n, {_K}] r"
    model, feeds = graph(f"float[n, {_K}] x", outputs, weights, body), {"x": normal(9, _K, seed=20)}
    expected = run(model, feeds)
    outcome = smooth(model, " ".join(f"{name}:3*9/5*4" for name in "wuv"))
    assert (outcome.coverage.done, outcome.coverage.of) == (3, 3)
    assert operators(model).count("Mul") == 1
    assert_equal_meaning(model, expected, feeds)
    quantize(model)
    assert operators(model).count("DynamicQuantizeLinear") == 1


def test_products_with_scales_of_their_own_have_a_mul_each() -> None:
    weights = {"w": normal(_K, 8), "u": normal(_K, 4, seed=1)}
    body = "h = LayerNormalization (x, gamma) y = MatMul (h, w) a = MatMul (h, u)"
    outputs, weights = "float[n, 8] y, float[n, 4] a", weights | {"gamma": normal(_K, seed=3)}
    model, feeds = graph(f"float[n, {_K}] x", outputs, weights, body), {"x": normal(9, _K, seed=20)}
    expected = run(model, feeds)
    smooth(model, "w:3*9 u:4*2")
    assert operators(model).count("Mul") == 2
    assert_equal_meaning(model, expected, feeds)


_TIED = {
    "another product": ("y = MatMul (x, w) a = MatMul (z, w)", 2),
    "a lookup": ("y = MatMul (x, w) a = Gather (w, ids)", 1),
    "a lookup, turned": ("t = Transpose <perm = [1, 0]> (w) y = MatMul (x, t) a = Gather (w, ids)", 1),
}


@pytest.mark.parametrize("reader", _TIED)
def test_a_weight_that_others_read_too_stays_as_it_is(reader: str) -> None:
    body, products = _TIED[reader]
    inputs = f"float[n, {_K}] x, float[n, {_K}] z, int64[m] ids"
    weight = normal(_K, _K)
    model = graph(inputs, f"float[n, {_K}] y, float[m, {_K}] a", {"w": weight}, body)
    outcome = smooth(model)
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (False, 0, products)
    assert {(left.name, left.reason) for left in outcome.coverage.left} == {("w", "its weight has other readers")}
    stored = model.graph.initializers["w"].const_value
    assert stored is not None and np.array_equal(stored.numpy(), weight)


@pytest.mark.parametrize("form", ["", "<transB = 1>"])
def test_a_gemm_takes_the_scales_along_its_inputs(form: str) -> None:
    weight = normal(_K, 8) if not form else normal(8, _K)
    body = f"h = Neg (x) y = Gemm {form} (h, w, bias)"
    model = graph(f"float[n, {_K}] x", "float[n, 8] y", {"w": weight, "bias": normal(8, seed=1)}, body)
    feeds = {"x": normal(9, _K, seed=20)}
    expected = run(model, feeds)
    smooth(model)
    assert_equal_meaning(model, expected, feeds)
    stored = model.graph.initializers["w"].const_value
    assert stored is not None
    ratio = stored.numpy() / weight
    assert math.isclose((ratio if not form else ratio.T)[3].mean(), 2**2.25, rel_tol=1e-6)


def test_only_the_products_that_are_named_are_scaled() -> None:
    weights = {"first": normal(_K, 8), "second": normal(_K, 8, seed=1)}
    body = "y = MatMul (x, first) z = MatMul (x, second)"
    model = graph(f"float[n, {_K}] x", "float[n, 8] y, float[n, 8] z", weights, body)
    outcome = smooth(model, "first:3*9 second:3*9", only="second")
    assert (outcome.coverage.done, outcome.coverage.of) == (1, 1)
    first, second = (model.graph.initializers[name].const_value for name in weights)
    assert first is not None and np.array_equal(first.numpy(), weights["first"])
    assert second is not None and not np.array_equal(second.numpy(), weights["second"])
