"""The parts of the encoders: attention, masks, positions and layers, each against a reference of another make.

References run in float64 with the same weights: a sum of a few hundred terms below 100 is then off by less than
300 roundings of 1.1e-16 of 100, and the layers behind it (norms, products) by some tens of such sums: 1e-10.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tx_export.models.parts.attention import MultiHeadAttention
from tx_export.models.parts.layers import Activation, Encoder, FeedForward, Norm, PostNormLayer, PreNormLayer
from tx_export.models.parts.masks import first_real, key_mask, mean_real, pool, visible
from tx_export.models.parts.positions import (
    LearnedPositions,
    SinusoidalPositions,
    running_positions,
    sinusoidal_table,
)

_BOUND = 1e-10  # see above
_MASKS = {
    "full": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]],
    "left": [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]],
    "holed": [[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]],
    "empty": [[0, 0, 0, 0, 0], [1, 0, 1, 1, 0]],
}
_SIZES = [(12, 3, 4), (100, 3, 32), (8, 1, 5)]  # d_model, num_heads, head_dim


@pytest.fixture(autouse=True)
def _seeded_doubles() -> None:
    torch.manual_seed(0)


def _mask(kind: str) -> Tensor:
    return torch.tensor(_MASKS[kind])


def _attention(d_model: int, num_heads: int, head_dim: int, dropout: float = 0.0) -> MultiHeadAttention:
    return MultiHeadAttention(d_model, num_heads, head_dim, dropout).double().eval()


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _close(found: Tensor, expected: Tensor, bound: float = _BOUND) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).detach().abs().max()) <= bound


def _linear(layer: nn.Linear, x: NDArray[np.float64]) -> NDArray[np.float64]:
    out: NDArray[np.float64] = x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
    return out


def _looped(
    module: MultiHeadAttention, x: Tensor, memory: Tensor, mask: Tensor, causal: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Output and weights, one query of one head of one row at a time, over the keys that it may see only."""
    q, k, v = (
        _linear(module.query, x.numpy()),
        _linear(module.key, memory.numpy()),
        _linear(module.value, memory.numpy()),
    )
    (rows, queries, _), keys, size = q.shape, k.shape[1], module.head_dim
    weights, context = np.zeros((rows, module.num_heads, queries, keys)), np.zeros(q.shape)
    for row, head, query in np.ndindex(rows, module.num_heads, queries):
        part = slice(head * size, (head + 1) * size)
        seen = [key for key in range(keys) if mask[row, key] and not (causal and key > query)]
        scores = [math.fsum(q[row, query, part] * k[row, key, part]) / math.sqrt(size) for key in seen]
        total = math.fsum(math.exp(score) for score in scores)
        for key, score in zip(seen, scores, strict=True):
            weights[row, head, query, key] = math.exp(score) / total
            context[row, query, part] += weights[row, head, query, key] * v[row, key, part]
    return _linear(module.output, context), weights


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", _MASKS)
@pytest.mark.parametrize("sizes", _SIZES)
def test_attention_is_the_loop_over_visible_keys(sizes: tuple[int, int, int], kind: str, causal: bool) -> None:
    module, x, mask = _attention(*sizes), _normal(2, 5, sizes[0]), _mask(kind)
    output, weights = _looped(module, x, x, mask, causal)
    _close(module(x, x, key_mask(mask, x.dtype), causal), torch.from_numpy(output))
    _close(module.weights(x, x, key_mask(mask, x.dtype), causal), torch.from_numpy(weights))


@pytest.mark.parametrize("kind", _MASKS)
def test_queries_may_attend_to_a_memory_of_another_length(kind: str) -> None:
    module, x, memory, mask = _attention(12, 3, 4), _normal(2, 3, 12), _normal(2, 5, 12), _mask(kind)
    output, _ = _looped(module, x, memory, mask, causal=False)
    _close(module(x, memory, key_mask(mask, x.dtype)), torch.from_numpy(output))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["full", "right", "left", "holed"])
@pytest.mark.parametrize("sizes", _SIZES)
def test_attention_is_torchs_scaled_dot_product(sizes: tuple[int, int, int], kind: str, causal: bool) -> None:
    module, x, mask = _attention(*sizes), _normal(2, 5, sizes[0]), _mask(kind)
    q, k, v = (
        layer(x).unflatten(2, (module.num_heads, module.head_dim)).transpose(1, 2)
        for layer in (module.query, module.key, module.value)
    )
    seen = (mask != 0)[:, None, None, :].expand(2, 1, 5, 5)
    seen = seen.tril() if causal else seen
    context = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    # torch says nothing about a query without keys; ours is zero there.
    context = context.where(seen.any(dim=-1, keepdim=True), torch.zeros(()).double())
    _close(module(x, x, key_mask(mask, x.dtype), causal), module.output(context.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("kind", ["full", "right", "left", "holed"])
def test_attention_and_its_weights_are_those_of_nn_multiheadattention(kind: str) -> None:
    module, x, mask = _attention(12, 3, 4), _normal(2, 5, 12), _mask(kind)
    other = _multihead(module, 12)
    output, weights = other(x, x, x, key_padding_mask=mask == 0, average_attn_weights=False)
    _close(module(x, x, key_mask(mask, x.dtype)), output)
    _close(module.weights(x, x, key_mask(mask, x.dtype)), weights)


def _multihead(module: MultiHeadAttention, d_model: int) -> nn.MultiheadAttention:
    other = nn.MultiheadAttention(d_model, module.num_heads, batch_first=True, dtype=torch.float64)
    layers = (module.query, module.key, module.value)
    with torch.no_grad():
        other.in_proj_weight.copy_(torch.cat([layer.weight for layer in layers]))
        other.in_proj_bias.copy_(torch.cat([layer.bias for layer in layers]))
    other.out_proj.load_state_dict(module.output.state_dict())
    return other.eval()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", _MASKS)
def test_weights_sum_to_one_where_a_key_is_visible_and_are_zero_elsewhere(kind: str, causal: bool) -> None:
    module, x, mask = _attention(12, 3, 4), 30 * _normal(2, 5, 12), _mask(kind)
    weights = module.weights(x, x, key_mask(mask, x.dtype), causal)
    seen = visible(key_mask(mask, x.dtype), 5, causal).expand(2, 3, 5, 5)
    assert float(weights[~seen].detach().abs().sum()) == 0
    # Five quotients with one denominator: each rounding is at most 1.1e-16.
    _close(weights.sum(dim=-1), seen.any(dim=-1).double(), 10 * 1.2e-16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_empty_row_attends_to_nothing_in_every_precision(dtype: torch.dtype) -> None:
    module = MultiHeadAttention(12, 3, 4).to(dtype).eval()
    x, mask = torch.randn(2, 5, 12).to(dtype), key_mask(_mask("empty"), dtype)
    output = module(x, x, mask)
    assert torch.equal(module.weights(x, x, mask)[0], torch.zeros(3, 5, 5, dtype=dtype))
    # A zero context leaves the bias of the output layer, exactly.
    assert torch.equal(output[0], module.output.bias.expand(5, 12))
    assert bool(output.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
def test_a_mask_of_any_dtype_means_the_same(dtype: torch.dtype) -> None:
    mask = _mask("empty")
    found = key_mask(mask.to(dtype), torch.float32)
    assert found.keys.dtype == torch.int32
    assert torch.equal(found.keys, mask.to(torch.int32))
    assert found.row_is_real is not None
    assert found.row_is_real.tolist() == [[[0.0]], [[1.0]]]
    weights: tuple[Callable[[Tensor, torch.dtype], Tensor], ...] = (first_real, mean_real)
    for weigh in weights:
        assert torch.equal(weigh(mask.to(dtype), torch.float32), weigh(mask, torch.float32))
    assert torch.equal(running_positions(mask.to(dtype)), running_positions(mask))


def test_dropout_falls_on_the_weights_in_training_only() -> None:
    module, x = _attention(12, 3, 4, dropout=0.5), _normal(2, 5, 12)
    mask = key_mask(_mask("full"), x.dtype)
    assert torch.equal(module(x, x, mask), module(x, x, mask))
    module.train()
    assert not torch.equal(module(x, x, mask), module(x, x, mask))


def test_no_key_behind_the_query_is_visible_when_causal() -> None:
    seen = visible(key_mask(torch.tensor([[1, 0, 1]]), torch.float32), 3, causal=True)
    assert seen.tolist() == [[[[True, False, False], [True, False, False], [True, False, True]]]]


@pytest.mark.parametrize(
    ("mask", "first", "mean"),
    [
        ([1, 1, 1, 1], [1, 0, 0, 0], [1 / 4] * 4),
        ([0, 0, 1, 1], [0, 0, 1, 0], [0, 0, 1 / 2, 1 / 2]),
        ([0, 1, 0, 1], [0, 1, 0, 0], [0, 1 / 2, 0, 1 / 2]),
        ([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_pooling_weights_pick_the_first_real_position_or_average_the_real_ones(
    mask: list[int], first: list[float], mean: list[float]
) -> None:
    assert first_real(torch.tensor([mask]), torch.float64).tolist() == [first]
    assert mean_real(torch.tensor([mask]), torch.float64).tolist() == [mean]


def test_pooling_is_the_weighted_sum_over_positions() -> None:
    x, weights = _normal(2, 5, 3), _normal(2, 5)
    expected = [[math.fsum(x[b, :, d] * weights[b]) for d in range(3)] for b in range(2)]
    _close(pool(x, weights), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([1, 1, 1, 1], [0, 1, 2, 3]),
        ([1, 1, 0, 0], [0, 1, 1, 1]),
        ([0, 0, 1, 1], [0, 0, 0, 1]),
        ([0, 1, 0, 1], [0, 0, 0, 1]),
        ([1, 0, 0, 1], [0, 0, 0, 1]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_positions_count_the_real_ones_before(mask: list[int], expected: list[int]) -> None:
    assert running_positions(torch.tensor([mask])).tolist() == [expected]


@pytest.mark.parametrize("d_model", [1, 2, 33, 128])
def test_the_sinusoidal_table_is_the_formula(d_model: int) -> None:
    table = sinusoidal_table(512, d_model)
    assert table.shape == (512, d_model)
    assert table.dtype == torch.float32
    for position, channel in np.ndindex(512, d_model):
        angle = position / 10000 ** ((channel - channel % 2) / d_model)
        expected = math.cos(angle) if channel % 2 else math.sin(angle)
        # One rounding to float32 of a number below 1, and of an angle below 512 in float64.
        assert abs(float(table[position, channel]) - expected) <= 2**-25 + 512 * 4 * 2**-53


@pytest.mark.parametrize("make", [SinusoidalPositions, LearnedPositions])
def test_positions_look_up_the_row_of_the_running_count(make: type[SinusoidalPositions | LearnedPositions]) -> None:
    positions = make(8, 6)
    found = positions(running_positions(torch.tensor([[0, 1, 0, 1, 1]])))
    assert torch.equal(found[0, [1, 3, 4]], _table(positions)[:3])


def _table(positions: SinusoidalPositions | LearnedPositions) -> Tensor:
    return positions.table if isinstance(positions, SinusoidalPositions) else positions.table.weight


def test_the_sinusoidal_table_is_no_weight() -> None:
    assert not SinusoidalPositions(8, 6).state_dict()
    assert list(LearnedPositions(8, 6).state_dict()) == ["table.weight"]


def _layer(norm: Norm, activation: Activation) -> PostNormLayer | PreNormLayer:
    make = PostNormLayer if norm == "post" else PreNormLayer
    return make(MultiHeadAttention(12, 3, 4), FeedForward(12, 20, activation, 0.0), 12, 1e-6, 0.0).double().eval()


def _torch_layer(ours: PostNormLayer | PreNormLayer, norm: Norm, activation: Activation) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        12, 3, 20, 0.0, activation, 1e-6, batch_first=True, norm_first=norm == "pre", dtype=torch.float64
    )
    layer.self_attn.load_state_dict(_multihead(ours.attention, 12).state_dict())
    assert isinstance(ours.feed_forward, FeedForward)
    pairs = (
        (layer.linear1, ours.feed_forward.up),
        (layer.linear2, ours.feed_forward.down),
        (layer.norm1, ours.attention_norm),
        (layer.norm2, ours.feed_forward_norm),
    )
    for theirs, own in pairs:
        nn.init.normal_(own.weight)
        nn.init.normal_(own.bias)
        theirs.load_state_dict(own.state_dict())
    return layer.eval()


@pytest.mark.parametrize("kind", ["full", "right", "left", "holed"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_layer_is_torchs_with_the_same_weights(norm: Norm, activation: Activation, kind: str) -> None:
    layer, x, mask = _layer(norm, activation), _normal(2, 5, 12), _mask(kind)
    # With gradients on, torch takes its plain path.
    expected = _torch_layer(layer, norm, activation)(x, src_key_padding_mask=mask == 0)
    _close(layer(x, key_mask(mask, x.dtype)), expected)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_an_encoder_is_scaled_embeddings_plus_positions_then_torchs_layers(norm: Norm, positions: str) -> None:
    encoder = Encoder(
        vocab_size=30,
        max_length=9,
        d_model=12,
        num_layers=2,
        num_heads=3,
        head_dim=4,
        d_ff=20,
        dropout=0.0,
        activation="relu",
        norm=norm,
        positions="learned" if positions == "learned" else "sinusoidal",
        relative=(32, 128),
        epsilon=1e-6,
    ).double()
    encoder.eval()
    ids, mask = torch.randint(0, 30, (2, 5)), _mask("left")
    theirs = [_torch_layer(layer, norm, "relu") for layer in encoder.layers]  # type: ignore[arg-type]
    table = _table(encoder.positions)  # type: ignore[arg-type]
    places = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 2, 3]])
    x = encoder.embedding.weight[ids] * math.sqrt(12) + table[places]
    for layer in theirs:
        x = layer(x, src_key_padding_mask=mask == 0)
    x = nn.functional.layer_norm(x, (12,), eps=1e-6) if norm == "pre" else x
    _close(encoder(ids, mask), x)


def test_scaled_embeddings_start_with_unit_variance() -> None:
    encoder = Encoder(
        vocab_size=4000,
        max_length=4,
        d_model=16,
        num_layers=1,
        num_heads=2,
        head_dim=8,
        d_ff=4,
        dropout=0.0,
        activation="relu",
        norm="post",
        positions="sinusoidal",
        relative=(32, 128),
        epsilon=1e-6,
    )
    variance = float(encoder.embedding.weight.detach().var()) * encoder.scale**2
    # The variance of n = 64,000 normal numbers spreads by sqrt(2 / n) = 0.0056; five times that.
    assert abs(variance - 1) <= 5 * math.sqrt(2 / 64000)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_feed_forward_is_two_products_around_the_activation(activation: Activation) -> None:
    module, x = FeedForward(6, 10, activation, 0.0).double().eval(), _normal(2, 3, 6)
    hidden = _linear(module.up, x.numpy())
    if activation == "relu":
        hidden = np.maximum(hidden, 0)
    else:
        hidden *= np.vectorize(lambda h: (1 + math.erf(h / math.sqrt(2))) / 2)(hidden)
    _close(module(x), torch.from_numpy(_linear(module.down, hidden)))
