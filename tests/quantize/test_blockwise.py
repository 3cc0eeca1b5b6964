"""Products in blocks: what is stored is computed exactly, no weight moves by more than a step, all is counted."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tx_export._releases import least_onnxruntime
from tx_export.errors import PassError, PluginError
from tx_export.passes import Stored
from tx_export.quantize.blockwise import Blockwise
from tx_export.testing import matmul_model

from .blocks import arithmetic_bound, initializer, quantize, scales, unpacked
from .graphs import graph, normal, operators, run, uneven

_FORMS = {
    "MatMul": ("y = MatMul (x, w)", False, False),
    "MatMul and bias": ("p = MatMul (x, w) y = Add (p, bias)", False, True),
    "turned MatMul": ("t = Transpose <perm = [1, 0]> (w) p = MatMul (x, t) y = Add (p, bias)", True, True),
    "Gemm": ("y = Gemm (x, w)", False, False),
    "Gemm with bias": ("y = Gemm (x, w, bias)", False, True),
    "Gemm and bias behind it": ("p = Gemm (x, w) y = Add (bias, p)", False, True),
    "Gemm with transB": ("y = Gemm <transB = 1> (x, w, bias)", True, True),
}
_KINDS = [(bits, symmetric) for bits in (4, 8) for symmetric in (True, False)]


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("accuracy_level", [0, 4])
def test_a_product_is_that_of_the_stored_weight_however_it_is_spelt(form: str, accuracy_level: int) -> None:
    body, turned, biased = _FORMS[form]
    weight, bias, x = uneven(64, 48), normal(48, seed=1), normal(9, 64, seed=2)
    constants = {"w": np.ascontiguousarray(weight.T) if turned else weight} | ({"bias": bias} if biased else {})
    model = graph("float[n, 64] x", "float[n, 48] y", constants, body)
    outcome = quantize(model, accuracy_level=accuracy_level)
    assert (outcome.modified, outcome.coverage.done, outcome.coverage.of) == (True, 1, 1)
    assert outcome.subject == "quantized" and operators(model)[0] == "MatMulNBits"
    stored = unpacked(model)[0].T
    exact = x.astype(np.float64) @ stored + (bias if biased else 0)
    bound = arithmetic_bound(x, stored, 32 if accuracy_level == 4 else None) + 1e-6 * np.abs(bias)
    assert (np.abs(run(model, {"x": x})["y"] - exact) <= bound).all()


@pytest.mark.parametrize(("bits", "symmetric"), _KINDS)
@pytest.mark.parametrize("shape", [(100, 96), (33, 96), (31, 5), (64, 1)])
def test_b135_widths_that_no_block_divides_are_right(bits: int, symmetric: bool, shape: tuple[int, int]) -> None:
    weight, x = uneven(*shape), normal(7, shape[0], seed=2)
    for accuracy_level in (0, 4):
        model = matmul_model(weight)
        quantize(model, bits=bits, symmetric=symmetric, method="round", accuracy_level=accuracy_level)
        stored = unpacked(model)[0].T
        # Half a step for rounding; the zero point is rounded too, which cuts off up to half a step at an end.
        step = np.abs(np.repeat(scales(model)[0].T, 32, axis=0)[: shape[0]])
        assert (np.abs(stored - weight) <= step * (0.5 if symmetric else 1) * (1 + 1e-5)).all()
        bound = arithmetic_bound(x, stored, 32 if accuracy_level == 4 else None)
        assert (np.abs(run(model, {"x": x})["y"] - x.astype(np.float64) @ stored) <= bound).all()


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(("bits", "symmetric"), _KINDS)
def test_b136_every_block_size_that_is_allowed_is_right(block_size: int, bits: int, symmetric: bool) -> None:
    weight, x = normal(1024, 64), normal(5, 1024, seed=2)
    for accuracy_level in (0, 1, 4):
        model = matmul_model(weight)
        quantize(model, block_size=block_size, bits=bits, symmetric=symmetric, accuracy_level=accuracy_level)
        stored = unpacked(model)[0].T
        exact = x.astype(np.float64) @ stored
        bound = arithmetic_bound(x, stored, block_size if accuracy_level == 4 else None)
        found = run(model, {"x": x})["y"]
        assert (np.abs(found - exact) <= bound).all() and np.abs(found).min(axis=1).max() > 0
        if accuracy_level != 4:
            assert np.abs(found - exact).max() <= 1e-3


@pytest.mark.parametrize("block_size", [0, 8, 24, 512])
def test_b136_other_block_sizes_are_refused_with_those_that_are_allowed(block_size: int) -> None:
    with pytest.raises(PluginError, match=rf"block_size is {block_size}; allowed: 16, 32, 64, 128, 256"):
        Blockwise.parse(f"block_size={block_size}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bits=2", "bits is 2; allowed: 4, 8"),
        ("accuracy_level=5", "accuracy_level is 5; allowed: 0, 1, 2, 3, 4"),
        ("method=magic", "method is magic; allowed: round, hqq"),
        ("size=3", "unknown option 'size=3'"),
    ],
)
def test_other_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(PluginError, match=f"pass blockwise: {message}"):
        Blockwise.parse(text)


def test_the_budget_and_the_least_runtime_follow_the_bits() -> None:
    assert (Blockwise().budget, Blockwise(bits=8).budget) == ("sqnr_db=5", "sqnr_db=20")
    needs = {}
    for bits in (4, 8):
        model = graph("float[n, 64] x", "float[n, 48] y", {"w": normal(64, 48)}, "y = MatMul (x, w)")
        quantize(model, bits=bits)
        needs[bits] = least_onnxruntime(model)
    assert needs == {4: "1.17.0", 8: "1.22.0"}


def test_the_text_form_is_read_back() -> None:
    item = Blockwise(bits=8, block_size=128, symmetric=True, exclude="head.weight,layers.0")
    assert Blockwise.parse(str(item).removeprefix("blockwise{").removesuffix("}")) == item


@pytest.mark.parametrize(("bits", "symmetric"), _KINDS)
@pytest.mark.parametrize("method", ["round", "hqq"])
@pytest.mark.filterwarnings("error")
def test_b127_rows_and_blocks_of_zeros_have_a_scale_and_give_exactly_their_bias(
    bits: int, symmetric: bool, method: str
) -> None:
    weight, bias = normal(64, 8), normal(8, seed=1)
    weight[:, 3] = 0
    weight[:, 4] = 1e-44  # so near to zero that no level of it is left
    weight[:32, 5] = 0
    for accuracy_level in (0, 4):
        model = graph("float[n, 64] x", "float[n, 8] y", {"w": weight, "bias": bias}, "y = Gemm (x, w, bias)")
        quantize(model, bits=bits, symmetric=symmetric, method=method, accuracy_level=accuracy_level)
        assert np.isfinite(scales(model)[0]).all() and (scales(model)[0] != 0).all()
        for rows in (1, 5):  # kernels of their own
            y = run(model, {"x": normal(rows, 64, seed=2)})["y"]
            assert (y[:, 3:5] == bias[3:5]).all()
        assert (unpacked(model)[0][5, :32] == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_b129_weights_that_are_not_finite_are_refused_with_name_and_number(value: float) -> None:
    weight = normal(16, 8)
    weight[3, 4] = weight[5, 6] = value
    for bits in (4, 8):
        with pytest.raises(PassError, match=rf"weight: 2 of 128 weights .* no {bits}-bit form"):
            Blockwise(bits=bits).call(matmul_model(weight))


def test_8_bit_products_do_not_saturate() -> None:
    # With all weights and inputs at the end of their range, pairs of products are over 2^15; all is exact in int32.
    weight, x = np.ones((256, 16), np.float32), np.ones((5, 256), np.float32)
    for symmetric in (True, False):
        model = matmul_model(weight)
        quantize(model, bits=8, symmetric=symmetric, method="round")
        for rows in (1, 5):
            assert np.abs(run(model, {"x": x[:rows]})["y"] - 256).max() <= 256 * 1e-5


def test_an_answer_does_not_depend_on_its_mates_in_the_batch() -> None:
    model, x = matmul_model(normal(64, 48)), normal(6, 64, seed=2)
    quantize(model)
    together = run(model, {"x": np.concatenate([x, 1000 * x])})["y"][:6]
    # The order of a sum in float32 is the only difference.
    assert (np.abs(together - run(model, {"x": x})["y"]) <= arithmetic_bound(x, normal(64, 48), None)).all()


@pytest.mark.parametrize("shape", ["float[64] x", "float[a, b, 64] x", "float[a, b, c, 64] x"])
def test_inputs_of_any_rank_are_right(shape: str) -> None:
    model = graph(shape, "float y", {"w": normal(64, 48)}, "y = MatMul (x, w)")
    model.graph.outputs[0].shape = None
    quantize(model, accuracy_level=0)
    x = normal(*[2, 3, 4][: shape.count(",")], 64, seed=2)
    exact = x.astype(np.float64) @ unpacked(model)[0].T
    assert (np.abs(run(model, {"x": x})["y"] - exact) <= arithmetic_bound(x, unpacked(model)[0].T, None)).all()


def test_what_is_left_is_told_with_its_reason() -> None:
    weights = {"w": normal(64, 48), "short": normal(3, 16), "many": normal(2, 64, 48), "left": normal(5, 64)}
    body = """t = Transpose <perm = [1, 0]> (x) a = MatMul (x, w) b = MatMul (z, short) c = MatMul (x, many)
              d = MatMul (left, t) e = MatMul (x, t)"""
    outputs = "float[n, 48] a, float[n, 16] b, float[2, n, 48] c, float[5, n] d, float[n, n] e"
    model = graph("float[n, 64] x, float[n, 3] z", outputs, weights, body)
    outcome = quantize(model)
    assert (outcome.coverage.done, outcome.coverage.of) == (1, 4)
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [
        ("short", "192 bytes, would be 336"),
        ("many", "the weight has 3 dimensions"),
        ("d", "the weight is the left operand"),
    ]


def test_weights_and_modules_are_excluded_by_name_and_unknown_names_are_an_error() -> None:
    names = ("head.weight", "layers.0.up.weight", "layers.0.down.weight", "layers.01.up.weight")

    def fresh() -> ir.Model:
        weights = {f"w{i}": normal(64, 48, seed=i) for i in range(4)}
        body = " ".join(f"y{i} = MatMul (x, w{i})" for i in range(4))
        model = graph("float[n, 64] x", ", ".join(f"float[n, 48] y{i}" for i in range(4)), weights, body)
        for i, name in enumerate(names):
            model.graph.initializers[f"w{i}"].name = name
        return model

    outcome = quantize(fresh(), exclude="head.weight, layers.0")
    assert [(left.name, left.reason) for left in outcome.coverage.left] == [
        (name, "excluded, 12288 bytes") for name in names[:3]
    ]
    with pytest.raises(PassError, match=r"no weight or module is named 'layers\.0\.u'; nearest weights: layers\.0\.up"):
        Blockwise(exclude="head,layers.0.u").call(fresh())


@pytest.mark.parametrize(
    ("body", "copies"),
    [
        ("h = MatMul (x, w) r = Relu (h) y = MatMul (r, w)", 1),
        ("t = Transpose <perm = [1, 0]> (w) h = MatMul (x, t) r = Relu (h) y = Gemm <transB = 1> (r, w)", 1),
        ("h = MatMul (x, w) r = Relu (h) y = Gemm <transB = 1> (r, w)", 2),  # blocks along the other axis
    ],
)
def test_layers_that_share_a_weight_share_the_stored_one(body: str, copies: int) -> None:
    model = graph("float[n, 64] x", "float[n, 64] y", {"w": normal(64, 64)}, body)
    assert quantize(model, accuracy_level=0).coverage.done == 2
    assert len([name for name in model.graph.initializers if "int4" in name]) == copies
    x, (first, second) = normal(5, 64, seed=1), (weight.T for weight in unpacked(model))
    hidden = np.maximum(x.astype(np.float64) @ first, 0)
    moved = arithmetic_bound(x, first, None) @ np.abs(second) + arithmetic_bound(hidden, second, None)
    assert (np.abs(run(model, {"x": x})["y"] - hidden @ second) <= moved).all()
    # And it is that weight, turned the right way: 20 dB of each rounding.
    exact = np.maximum(x @ normal(64, 64), 0) @ (normal(64, 64).T if copies == 2 else normal(64, 64))
    exact = np.maximum(x @ normal(64, 64).T, 0) @ normal(64, 64).T if "Transpose" in body else exact
    assert ((hidden @ second - exact) ** 2).sum() <= (exact**2).sum() / 20


def test_a_weight_in_4_bits_takes_a_sixth_of_its_bytes_and_both_are_told() -> None:
    model = matmul_model(normal(256, 64))
    outcome = quantize(model)
    arrays = [initializer(model, name) for name in model.graph.initializers]
    # 4 bits, and a scale and half a byte of zero point for 32: 20.5 bytes where there were 128.
    after = 256 * 64 // 32 * 41 // 2
    assert sum(array.nbytes for array in arrays) == after
    assert outcome.coverage.stored == (Stored("weight", 256 * 64 * 4, after, "int4"),)
    assert initializer(model, "weight.int4").shape == (64, 8, 16)
