"""Modules as people write them, through torch.onnx and the pass; the references are eager and the graph before it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from einops import rearrange
from torch import Tensor, nn

from tx_export.export import Target, export
from tx_export.optimize.fold_constants import FoldConstants
from tx_export.passes import Coverage
from tx_export.testing import eager_model

from .attention_graphs import KINDS, SIZES, close, fuse, opened, padding

_WIDTH, _HEADS, _SIZE = 16, 4, 4
_LOWEST = torch.finfo(torch.float32).min


class _Projected(nn.Module):
    """Query, key and value of x, and what is made of their context."""

    def __init__(self, keys: int = _WIDTH) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, keys), nn.Linear(_WIDTH, keys)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def apart(self, x: Tensor) -> list[Tensor]:
        """[B, H, T, head_dim] of each."""
        return [part(x).view(x.shape[0], x.shape[1], -1, _SIZE).transpose(1, 2) for part in (self.q, self.k, self.v)]

    def flat(self, x: Tensor) -> list[Tensor]:
        """[B * H, T, head_dim] of each."""
        return [part.reshape(-1, x.shape[1], _SIZE) for part in self.apart(x)]

    def together(self, context: Tensor) -> Tensor:
        joined: Tensor = self.out(context.transpose(1, 2).contiguous().flatten(2))
        return joined


class MatMulAndFill(_Projected):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.apart(x)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return self.together(scores.masked_fill(mask[:, None, None, :] == 0, -1e9).softmax(dim=-1) @ v)


class AddedMask(_Projected):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.apart(x)
        hidden = (1.0 - mask[:, None, None, :].to(x.dtype)) * _LOWEST
        return self.together(torch.softmax(torch.matmul(q, k.mT) * _SIZE**-0.5 + hidden, -1) @ v)


class PackedAndCausal(nn.Module):
    """One projection for all three, cut in chunks, under a stored triangle."""

    triangle: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False), nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("triangle", torch.ones(32, 32).tril().view(1, 1, 32, 32))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (_HEADS, _SIZE)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.triangle[:, :, : x.shape[1], : x.shape[1]] == 0, float("-inf"))
        joined: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
        return joined


class EinopsAndWhere(_Projected):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (rearrange(part(x), "b t (h d) -> b h t d", h=_HEADS) for part in (self.q, self.k, self.v))
        scores = torch.einsum("b h i d, b h j d -> b h i j", q * _SIZE**-0.5, k)
        scores = torch.where(rearrange(mask.bool(), "b j -> b 1 1 j"), scores, torch.full_like(scores, _LOWEST))
        context = torch.einsum("b h i j, b h j d -> b h i d", scores.softmax(-1), v)
        joined: Tensor = self.out(rearrange(context, "b h t d -> b t (h d)"))
        return joined


class EinsumAndLateScale(_Projected):
    """Heads stay third, and the scale comes behind the mask."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part(x).view(*x.shape[:2], _HEADS, _SIZE) for part in (self.q, self.k, self.v))
        scores = torch.einsum("nqhd,nkhd->nhqk", [q, k]).masked_fill(mask[:, None, None] == 0, float("-1e20"))
        weights = torch.softmax(scores / _WIDTH**0.5, dim=3)
        joined: Tensor = self.out(torch.einsum("nhqk,nkhd->nqhd", [weights, v]).reshape(x.shape))
        return joined


class FlatHeadsAndExpandedMask(_Projected):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        (batch, tokens), (q, k, v) = x.shape[:2], self.flat(x)
        scores = torch.bmm(q * _SIZE**-0.5, k.transpose(1, 2)).view(batch, _HEADS, tokens, tokens)
        hidden = torch.zeros(batch, 1, tokens, tokens).masked_fill((mask == 0)[:, None, None, :], _LOWEST)
        weights = (scores + hidden).view(-1, tokens, tokens).softmax(dim=-1)
        return self.together(torch.bmm(weights, v).view(batch, _HEADS, tokens, _SIZE))


class SlopesAndCausal(_Projected):
    """baddbmm of a slope for each head and position, then one mask of padding and future."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        (batch, tokens), (q, k, v) = x.shape[:2], self.flat(x)
        slopes = torch.tensor([2.0**-i for i in range(_HEADS)])[None, :, None]
        bias = (slopes * ((mask.cumsum(-1) - 1) * mask)[:, None, :]).reshape(-1, 1, tokens)
        scores = bias.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=0.5).view(batch, _HEADS, tokens, tokens)
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future | (mask == 0)[:, None, None, :], _LOWEST).softmax(-1)
        return self.together(torch.bmm(weights.view(-1, tokens, tokens), v).view(batch, _HEADS, tokens, _SIZE))


class GroupedQueries(_Projected):
    def __init__(self) -> None:
        super().__init__(keys=2 * _SIZE)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.apart(x)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.mT / 2).masked_fill(~past, -1e9).masked_fill((mask == 0)[:, None, None, :], -1e9)
        return self.together(scores.softmax(-1) @ v)


class RelativeBias(_Projected):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, _HEADS)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.apart(x)
        at = torch.arange(x.shape[1])
        bias = self.table((at[None, :] - at[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1)[None]
        scores = (q @ k.mT * 0.5 + bias).masked_fill((mask == 0)[:, None, None, :], torch.finfo(torch.float16).min)
        return self.together(scores.softmax(-1) @ v)


class OneHead(_Projected):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = torch.bmm(self.q(x), self.k(x).transpose(1, 2)) / math.sqrt(_WIDTH)
        joined: Tensor = self.out(scores.masked_fill(mask[:, None, :] == 0, -1e9).softmax(-1) @ self.v(x))
        return joined


class FlatMaskAndBaddbmm(_Projected):
    """As nn.MultiheadAttention is written where it returns weights: one added mask for each head of each row."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        (batch, tokens), (q, k, v) = x.shape[:2], self.flat(x)
        hidden = torch.zeros(batch, tokens).masked_fill(mask == 0, float("-inf")).view(batch, 1, 1, tokens)
        hidden = hidden.expand(-1, _HEADS, -1, -1).reshape(batch * _HEADS, 1, tokens)
        weights = torch.baddbmm(hidden, q * math.sqrt(1.0 / _SIZE), k.transpose(-2, -1)).softmax(dim=-1)
        return self.together(torch.bmm(weights, v).view(batch, _HEADS, tokens, _SIZE))


class WeightsUsed(_Projected):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.apart(x)
        weights = (q @ k.mT / 2).masked_fill(mask[:, None, None, :] == 0, -1e9).softmax(-1)
        return self.together(weights @ v) + weights.mean(dim=1).amax(dim=-1, keepdim=True)


_FUSED: tuple[Callable[[], nn.Module], ...] = (
    MatMulAndFill,
    AddedMask,
    PackedAndCausal,
    EinopsAndWhere,
    EinsumAndLateScale,
    FlatHeadsAndExpandedMask,
    SlopesAndCausal,
    GroupedQueries,
    RelativeBias,
    OneHead,
    FlatMaskAndBaddbmm,
)
_NAMES = [item.__name__ for item in (*_FUSED, WeightsUsed)]


class All(nn.Module):
    """Every module on the same input: one export for all."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(make() for make in (*_FUSED, WeightsUsed))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x, mask) for part in self.parts)


@pytest.fixture(scope="module")
def exported() -> tuple[nn.Module, ir.Model, ir.Model, Coverage]:
    """The module, its graph, the graph behind the pass, and what the pass counted."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = All()
    inputs = [f"x:float32[batch,tokens<=32,{_WIDTH}]", "mask:int64[batch,tokens<=32]"]
    model = eager_model(module, inputs, [f"{name}:float32[batch,tokens,{_WIDTH}]" for name in _NAMES])
    before = export(model, Target.parse(None, "fused"))
    FoldConstants()(before)
    after = before.clone()
    return module, before, after, fuse(after).coverage


def test_every_layer_is_fused_or_told_why_not(exported: tuple[Any, ir.Model, ir.Model, Coverage]) -> None:
    _, _, after, coverage = exported
    assert [left.reason for left in coverage.left] == ["its weights are read elsewhere"]
    assert (coverage.done, coverage.of) == (len(_FUSED), len(_FUSED) + 1)
    assert [node.op_type for node in after.graph].count("MultiHeadAttention") == len(_FUSED)
    assert [node.op_type for node in after.graph].count("Softmax") == 1


def test_all_answers_are_those_of_eager_and_of_the_graph_before(
    exported: tuple[nn.Module, ir.Model, ir.Model, Coverage],
) -> None:
    module, before, after, _ = exported
    unfused, fused = opened(before), opened(after)
    rng = np.random.default_rng(0)
    for (batch, tokens), kind in itertools.product(SIZES, KINDS):
        x = rng.normal(size=(batch, tokens, _WIDTH)).astype(np.float32) * 3
        mask = padding(kind, batch, tokens)
        with torch.no_grad():
            eager = module(torch.from_numpy(x), torch.from_numpy(mask))
        found = fused.run(_NAMES, {"x": x, "mask": mask})
        graph = unfused.run(_NAMES, {"x": x, "mask": mask})
        for name, expected, also, got in zip(_NAMES, eager, graph, found, strict=True):
            close(got, expected.numpy(), f"{name} {batch}x{tokens} {kind}, eager")
            close(got, also, f"{name} {batch}x{tokens} {kind}, unfused")
