"""Attention that torch computes is emitted as one operator a call, and stays what eager computes, whatever the mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tx_export import plugins
from tx_export.artifact import open_graph
from tx_export.export import Target, export
from tx_export.passes import Context, Pipeline
from tx_export.providers.cpu import Cpu
from tx_export.spec import EagerModel
from tx_export.testing import eager_model
from tx_export.verify import Judge

_IDS, _MASK = "ids:int64[batch,tokens<=40]{0..99}", "mask:int64[batch,tokens<=40]"
_MEMORY, _SEEN = "memory:float32[batch,source<=30,24]", "memory_mask:bool[batch,source<=30]"


class DotProducts(nn.Module):
    """Every way to call F.scaled_dot_product_attention; q [B, 4, T, 6], and k and v of the memory [B, 4, S, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 24)
        self.lengths = nn.Parameter(torch.randn(4, 40, 40))

    def forward(self, ids: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> tuple[Tensor, ...]:
        x = self.words(ids)
        (batch, tokens), source = ids.shape, memory.shape[1]
        q, k = (each.unflatten(2, (4, 6)).transpose(1, 2) for each in (x, memory))
        real, seen = mask != 0, memory_mask[:, None, None, :]
        pairs = torch.ones(tokens, source, dtype=torch.bool).tril(2)
        lowest = torch.zeros(batch, 1, 1, source).masked_fill(~seen, -torch.inf)
        bias, attend = self.lengths[:, :tokens, :tokens], functional.scaled_dot_product_attention
        return (
            attend(q, q, q),
            attend(q, q, q, is_causal=True),
            attend(q, k, k, is_causal=True),
            attend(q, k, k, seen),
            attend(q, k, k, seen.expand(batch, 4, tokens, source), scale=0.7),
            attend(q, k, k, seen & pairs),
            attend(q, k, k, pairs),
            attend(q, k, k, lowest),
            attend(q, q, q, bias),
            attend(q, q, q, bias.masked_fill(~real[:, None, None], -torch.inf)),
            attend(q, q, q, (torch.arange(4) % 2 == 0)[:, None, None] | real[:, None, None]),
            attend(q, k[:, :2], k[:, 2:], seen, enable_gqa=True),
            attend(x, memory, memory, memory_mask[:, None, :]),
            attend(x, x, x[..., :5]),
            attend(x[0], memory[0], memory[0]),
            attend(q[:, None], k[:, None], k[:, None], seen[:, None]),
            attend(q, k[:1], k[:1, :1]),
            attend(q.double(), k.double(), k.double(), seen),
        )


class Stock(nn.Module):
    """nn.MultiheadAttention in its forms, nn.TransformerEncoder and nn.TransformerDecoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 24)
        self.plain = nn.MultiheadAttention(24, 4, batch_first=True, bias=False)
        self.wide = nn.MultiheadAttention(24, 2, kdim=24, vdim=12)
        self.unusual = nn.MultiheadAttention(24, 4, batch_first=True, add_bias_kv=True)
        layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.3)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(24))
        decoder = nn.TransformerDecoderLayer(24, 4, 48, activation="gelu", batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(decoder, 2)

    def forward(self, ids: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> tuple[Tensor, ...]:
        x, padding = self.words(ids), mask == 0
        batch, tokens = ids.shape
        causal = nn.Transformer.generate_square_subsequent_mask(tokens)
        nearby = ~torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(-3)
        crosswise, weights = self.wide(x.transpose(0, 1), memory.transpose(0, 1), memory.transpose(0, 1)[..., :12])
        each = nearby.expand(4 * batch, tokens, tokens)
        return (
            self.plain(x, x, x, padding, need_weights=False)[0],
            self.plain(x, x, x, need_weights=False, attn_mask=nearby)[0],
            self.plain(x, x, x, need_weights=False, attn_mask=causal, is_causal=True)[0],
            self.plain(x, x, x, padding, need_weights=False, attn_mask=each)[0],
            self.plain(x, memory, memory, 3.0 * memory_mask, average_attn_weights=False)[1],
            crosswise,
            weights,
            self.unusual(x, memory, memory, ~memory_mask, need_weights=False)[0],
            self.encoder(x.transpose(0, 1), src_key_padding_mask=padding),
            self.encoder(x.transpose(0, 1), mask=causal, src_key_padding_mask=padding),
            self.decoder(x, memory, causal, tgt_is_causal=True, memory_key_padding_mask=~memory_mask),
        )


_FUSED = {"DotProducts": 17, "Stock": 4 + 1 + 1 + 2 * 2 + 2 * 2}  # for float64, and for weights alone, none
_MODULES: Mapping[str, Callable[[], nn.Module]] = {"DotProducts": DotProducts, "Stock": Stock}
_OPERATORS = ("Attention", "MultiHeadAttention")


def model(name: str) -> EagerModel:
    """The module with seeded weights, and its outputs as they come."""
    torch.manual_seed(0)
    module = _MODULES[name]().eval()
    return eager_model(module, [_IDS, _MASK, _MEMORY, _SEEN], _outputs(name))


def _outputs(name: str) -> list[str]:
    text, wide = "float32[batch,tokens<=40,24]", "float32[batch,4,tokens<=40,6]"
    if name == "DotProducts":
        five, double = "float32[batch,1,4,tokens<=40,6]", "float64[batch,4,tokens<=40,6]"
        texts = [wide] * 12 + [text, "float32[batch,tokens<=40,5]", "float32[tokens<=40,24]", five, wide, double]
    else:
        first = "float32[tokens<=40,batch,24]"
        weights = ["float32[batch,4,tokens<=40,source<=30]", first, "float32[batch,tokens<=40,source<=30]"]
        texts = [text] * 4 + weights + [text, first, first, text]
    return [f"out_{index}:{text}" for index, text in enumerate(texts)]


def compiled(eager: EagerModel, target: Target) -> ir.Model:
    graph = export(eager, target)
    pipeline = Pipeline.parse("fold_constants merge_views pack_qkv", lambda name: plugins.find("pass", name))
    context = Context(eager.module, (), lambda each: open_graph(each, Cpu().session()))
    pipeline.run_graph(graph, context, frozenset(), lambda item, outcome: None)
    return graph


def operators(graph: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in graph.graph.all_nodes())


@pytest.mark.parametrize(
    ("name", "release", "ops"),
    [
        ("DotProducts", None, "fused"),
        ("DotProducts", None, "standard"),
        ("DotProducts", "1.23", "standard"),
        ("Stock", None, "fused"),
        ("Stock", None, "standard"),
    ],
)
def test_attention_of_torch_is_eager_s_at_every_shape_and_mask(
    name: str, release: str | None, ops: Literal["fused", "standard"]
) -> None:
    eager = model(name)
    graph = compiled(eager, Target.parse(release, ops))
    # Reference: the untouched module in eager, over the whole grid, within the bound of fp32.
    Judge(eager).check_exact(ops, open_graph(graph, Cpu().session()))
    counted = operators(graph)
    if release is not None or ops == "fused":
        assert sum(counted[each] for each in _OPERATORS) == _FUSED[name]
    if ops == "standard":
        assert set(graph.opset_imports) == {""}
