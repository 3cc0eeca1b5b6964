"""Rotary, ALiBi and relative positions: formulas, attention that uses them, and graphs at lengths beyond the sample's.

References run in float64 where ours does; the bounds are those of test_parts.py: some hundred roundings of 1.1e-16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.t5.modeling_t5 import T5Attention

from tx_export.export import Target, export
from tx_export.metrics import fidelity_bound
from tx_export.models.classifier import Classifier
from tx_export.models.parts.attention import MultiHeadAttention, PackedSelfAttention
from tx_export.models.parts.biases import AlibiBias, RelativeBias, alibi_slopes, distances, relative_buckets
from tx_export.models.parts.layers import Positions
from tx_export.models.parts.masks import KeyMask, key_mask, within_reach
from tx_export.models.parts.positions import RotaryPositions
from tx_export.optimize.fold_constants import FoldConstants
from tx_export.spec import EagerModel
from tx_export.testing import eager_model, run_graph

_BOUND = 1e-10  # see above
_MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 1, 1]])
_PLACES = torch.arange(5).expand(4, 5)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _close(found: Tensor, expected: Tensor, bound: float = _BOUND) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).detach().abs().max()) <= bound


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (8, [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]),
    ],
)
def test_b044_alibi_slopes_are_the_papers(heads: int, slopes: list[float]) -> None:
    assert alibi_slopes(heads).tolist() == slopes


def test_b044_the_alibi_bias_is_minus_slope_times_distance() -> None:
    bias = AlibiBias(6)(torch.tensor([[0, 1, 2, 5]]))
    assert bias.shape == (1, 6, 4, 4)
    assert bias[0, :, 0, 3].tolist() == (-5 * alibi_slopes(6)).tolist()
    assert torch.equal(bias, bias.transpose(2, 3))
    assert float(bias.diagonal(dim1=2, dim2=3).abs().max()) == 0


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 20), (8, 9)])
def test_b046_buckets_are_those_of_t5(buckets: int, max_distance: int) -> None:
    near = torch.arange(-300, 301)
    theirs: Any = T5Attention
    expected = theirs._relative_position_bucket(near, True, buckets, max_distance)
    assert torch.equal(relative_buckets(near, buckets, max_distance), expected)


@pytest.mark.parametrize("tokens", [1, 2, 21, 40, 200])
def test_b046_the_relative_bias_is_mpnets_at_every_length(tokens: int) -> None:
    theirs: Any = MPNetEncoder.__new__(MPNetEncoder)
    nn.Module.__init__(theirs)
    ours = RelativeBias(3, 32, 128)
    theirs.relative_attention_bias = ours.table
    expected = theirs.compute_position_bias(torch.zeros(1, tokens, 1))
    assert torch.equal(ours(torch.arange(tokens)[None]), expected)


def test_rotation_turns_query_and_key_as_transformers_does() -> None:
    rotation = RotaryPositions(16, 6, 100.0)(torch.tensor([[0, 1, 2, 3, 4], [0, 0, 3, 9, 15]]))
    x = torch.randn(2, 5, 12)
    angles = (rotation.positions[..., None] * rotation.frequencies).repeat(1, 1, 2)
    heads = x.reshape(2, 5, 2, 6).transpose(1, 2)
    expected, _ = apply_rotary_pos_emb(heads, heads, angles.cos(), angles.sin())
    _close(rotation.plain(x, 2), expected.transpose(1, 2).reshape(2, 5, 12), 4 * 1.2e-7 * float(x.abs().max()))


def test_only_the_difference_of_rotary_positions_matters() -> None:
    rotary = RotaryPositions(16, 4, 100.0).double()
    attention, x, mask = MultiHeadAttention(12, 3, 4).double().eval(), _normal(4, 5, 12), key_mask(_MASK, torch.float64)
    found = attention(x, x, mask, rotation=rotary(_PLACES))
    _close(attention(x, x, mask, rotation=rotary(_PLACES + 7)), found)
    assert float((attention(x, x, mask) - found).detach().abs().max()) > 1e-3


def test_a_bias_is_added_to_the_scores_before_padding_is_hidden() -> None:
    attention, x, bias = MultiHeadAttention(12, 3, 4).double().eval(), _normal(4, 5, 12), 3 * _normal(4, 3, 5, 5)
    q, k, v = (
        layer(x).unflatten(2, (3, 4)).transpose(1, 2) for layer in (attention.query, attention.key, attention.value)
    )
    hidden = bias.masked_fill((_MASK == 0)[:, None, None, :], float("-inf"))
    context = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=hidden)
    found = attention(x, x, key_mask(_MASK, x.dtype)._replace(bias=bias))
    _close(found, attention.output(context.transpose(1, 2).flatten(2)))


def test_packed_self_attention_is_the_attention_with_three_products() -> None:
    apart, packed = MultiHeadAttention(12, 3, 4).double().eval(), PackedSelfAttention(12, 3, 4).double().eval()
    with torch.no_grad():
        layers = (apart.query, apart.key, apart.value)
        packed.qkv.weight.copy_(torch.cat([layer.weight for layer in layers]))
        packed.qkv.bias.copy_(torch.cat([layer.bias for layer in layers]))
    packed.output.load_state_dict(apart.output.state_dict())
    x, mask, rotation = _normal(4, 5, 12), key_mask(_MASK, torch.float64), RotaryPositions(5, 4, 9.0)(_PLACES)
    _close(packed(x, mask, rotation), apart(x, x, mask, rotation=rotation))


def _reached(reach: int) -> tuple[KeyMask, Tensor]:
    """The mask, and for real queries which keys they see."""
    mask = within_reach(key_mask(_MASK, torch.float64), distances(_PLACES[:1]), reach, torch.float64)
    near = (torch.arange(5)[:, None] - torch.arange(5)).abs() <= reach
    return mask, near & (_MASK != 0)[:, None, :]


@pytest.mark.parametrize("reach", [0, 1, 3])
def test_a_real_query_sees_the_real_keys_within_reach(reach: int) -> None:
    mask, seen = _reached(reach)
    attention, x = MultiHeadAttention(12, 3, 4).double().eval(), _normal(4, 5, 12)
    weights = attention.weights(x, x, mask)
    real = (_MASK != 0)[:, None, :, None].expand_as(weights)
    assert torch.equal((weights > 0)[real], seen[:, None].expand_as(weights)[real])
    _close(weights.sum(dim=-1), torch.ones(4, 3, 5).double(), 10 * 1.2e-16)


def test_padding_with_nothing_in_reach_sees_every_real_key_evenly_biased() -> None:
    mask, seen = _reached(0)
    assert mask.bias is not None
    alone = ~seen.any(dim=-1)
    assert torch.equal(alone, _MASK == 0)
    assert float(mask.bias[:, 0][alone].abs().max()) == 0


_SPEC = Classifier(vocab_size=50, max_length=40, d_model=16, num_layers=1, num_heads=4, d_ff=32, relative_distance=20)
_KINDS: tuple[Positions, ...] = ("rotary", "alibi", "relative")


def _classifier(positions: Positions) -> nn.Module:
    """Weights are large, so that attention prefers some tokens and a wrong bias shows."""
    module = dataclasses.replace(_SPEC, positions=positions).build().eval()
    with torch.no_grad():
        for layer in (layer for layer in module.modules() if isinstance(layer, nn.Linear)):
            layer.weight.copy_(torch.randn_like(layer.weight) * 0.4)
    return module


class _Together(nn.Module):
    """One of each kind, so that one export does for all."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(_classifier(positions) for positions in _KINDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
        return [module(input_ids, attention_mask) for module in self.each]


# What a layer is in each spelling: the target that asks for it, and the operator that is there once a layer.
_SPELLINGS: dict[str, tuple[str | None, Literal["fused", "standard"], str]] = {
    "fused": (None, "fused", "MultiHeadAttention"),
    "attention": ("1.23", "standard", "Attention"),
    "plain": (None, "standard", "Softmax"),
}


@pytest.mark.parametrize("spelling", _SPELLINGS)
def test_b044_b046_every_spelling_equals_eager_beyond_the_sample_length(spelling: str) -> None:
    """The sample has 7 tokens; 32 buckets up to distance 20. Beside each length a mask with padding of every kind."""
    version, ops, operator = _SPELLINGS[spelling]
    outputs = [f"{positions}:float32[batch,2]" for positions in _KINDS]
    model = eager_model(_Together(), _SPEC.inputs(), outputs)
    graph = export(model, Target.parse(version, ops))
    FoldConstants()(graph)
    kinds = [node.op_type for node in graph.graph]
    assert kinds.count(operator) == len(_KINDS)
    assert kinds.count("RotaryEmbedding") == (2 if spelling == "fused" else 0)
    assert spelling != "fused" or not {"Shape", "Reshape", "Expand", "Softmax"} & set(kinds)
    for tokens in (1, 8, 21, 40):
        _assert_equal(model, graph, tokens)


def _assert_equal(model: EagerModel, graph: ir.Model, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    mask = (rng.random((4, tokens)) < 0.7).astype(np.int64)
    mask[0], mask[1, : tokens // 2], mask[2, (tokens + 1) // 2 :], mask[3, -1] = 1, 0, 0, 1
    feeds = {"input_ids": rng.integers(0, 50, (4, tokens)), "attention_mask": mask}
    with torch.no_grad():
        every = model.module(*(torch.from_numpy(feeds[spec.name]) for spec in model.inputs))
    for found, eager in zip(run_graph(graph, feeds).values(), (each.numpy() for each in every), strict=True):
        assert np.abs(found - eager).max() <= fidelity_bound(float(np.abs(eager).max()))


@pytest.mark.parametrize("positions", _KINDS)
def test_positions_change_the_answer(positions: Positions) -> None:
    """Without positions an encoder's first token doesn't depend on the order of the others."""
    run: Callable[[Tensor, Tensor], Tensor] = _classifier(positions)
    ids, mask = torch.tensor([[3, 7, 11, 19, 23]]), torch.ones(1, 5, dtype=torch.int64)
    assert float((run(ids, mask) - run(ids[:, [0, 4, 2, 1, 3]], mask)).detach().abs().max()) > 1e-2


def test_slopes_of_many_heads_fall_from_below_one_to_two_to_the_minus_eight() -> None:
    for heads in range(1, 65):
        slopes = alibi_slopes(heads)
        assert len(set(slopes.tolist())) == heads
        assert math.isclose(float(slopes.min()), 2**-8)
        assert float(slopes.max()) < 1
