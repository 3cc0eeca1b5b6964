"""Heads of nn.MultiheadAttention: what stands in its place is called alike and gives what torch gives."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tx_export.errors import PassError
from tx_export.passes import Context
from tx_export.quantize._heads_torch import KeptTorchHeads
from tx_export.quantize.prune_heads import PruneHeads

_BOUND = 1e-5  # two products of 24 numbers near 3 in another order: 2 x 24 x 6e-8 x 3
_BATCH, _TOKENS, _SOURCE = 3, 5, 7


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(24, 4, **options).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def without(layer: nn.MultiheadAttention, heads: tuple[int, ...]) -> nn.MultiheadAttention:
    """Torch's own, with the columns of these heads zeroed in its output product."""
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for head in heads:
            copied.out_proj.weight[:, 6 * head : 6 * head + 6] = 0
    return copied


_PADDING = torch.arange(_SOURCE) >= torch.tensor([7, 4, 2])[:, None]  # True hides
_CAUSAL = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).triu(1)
_PAIRS = normal(_TOKENS, _SOURCE, seed=3) > 1
_CALLS: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "padding": {"key_padding_mask": _PADDING},
    "float padding": {"key_padding_mask": torch.zeros(_BATCH, _SOURCE).masked_fill(_PADDING, -torch.inf)},
    "pairs": {"attn_mask": _PAIRS},
    "float pairs": {"attn_mask": normal(_TOKENS, _SOURCE, seed=4)},
    "pairs of each head": {"attn_mask": normal(_BATCH * 4, _TOKENS, _SOURCE, seed=5)},
    "both": {"key_padding_mask": _PADDING, "attn_mask": _PAIRS & ~_PAIRS[:, :1]},
    "both as numbers": {"key_padding_mask": _PADDING.float(), "attn_mask": normal(_TOKENS, _SOURCE, seed=4)},
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("call", _CALLS)
def test_each_way_to_call_it_gives_what_torch_gives(call: str, batch_first: bool, weighted: bool) -> None:
    layer = attention(batch_first=batch_first)
    query, memory = normal(_BATCH, _TOKENS, 24, seed=1), normal(_BATCH, _SOURCE, 24, seed=2)
    if not batch_first:
        query, memory = query.transpose(0, 1), memory.transpose(0, 1)
    options = {**_CALLS[call], "need_weights": weighted, "average_attn_weights": False}
    out, weights = KeptTorchHeads(layer, (0, 3))(query, memory, memory, **options)
    expected, expected_weights = without(layer, (1, 2))(query, memory, memory, **options)
    assert out.shape == expected.shape and (out - expected).abs().max() <= _BOUND
    assert (weights is None) == (expected_weights is None)
    if weights is not None:
        assert (weights - expected_weights[:, [0, 3]]).abs().max() <= _BOUND


@pytest.mark.parametrize(
    "options", [{"kdim": 10, "vdim": 8}, {"bias": False}, {"kdim": 10, "vdim": 8, "bias": False}], ids=str
)
def test_keys_and_values_of_another_width_and_no_bias_are_kept_so(options: Mapping[str, Any]) -> None:
    layer = attention(batch_first=True, **options)
    key, value = (normal(_BATCH, _SOURCE, options.get(name, 24), seed=2) for name in ("kdim", "vdim"))
    query = normal(_BATCH, _TOKENS, 24, seed=1)
    out, weights = KeptTorchHeads(layer, (0, 1, 2, 3))(query, key, value)
    expected, expected_weights = layer(query, key, value)
    assert (out - expected).abs().max() <= _BOUND and (weights - expected_weights).abs().max() <= _BOUND


def test_one_sequence_without_a_batch_and_the_causal_hint_are_taken() -> None:
    layer = attention()
    x, hidden = normal(_TOKENS, 24, seed=1), torch.tensor([False, False, False, True, True])
    for options in ({"attn_mask": _CAUSAL, "is_causal": True, "need_weights": False}, {"key_padding_mask": hidden}):
        out, weights = KeptTorchHeads(layer, (0, 1, 2, 3))(x, x, x, **options)
        expected, expected_weights = layer(x, x, x, **options)
        assert out.shape == expected.shape and (out - expected).abs().max() <= _BOUND
        assert weights is None or (weights - expected_weights).abs().max() <= _BOUND


class Stock(nn.Module):
    """Torch's encoder and decoder, whose layers attend to themselves and to the encoder's result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 4, 48, batch_first=True), 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        memory = self.encoder(x, src_key_padding_mask=mask == 0)
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out: Tensor = self.decoder(x, memory, tgt_mask=causal, memory_key_padding_mask=mask == 0)
        return out


_FEEDS = {"x": normal(3, 5, 24, seed=6).numpy(), "mask": (~_PADDING[:, :5]).numpy().astype("int64")}


@pytest.mark.parametrize("fast", [False, True])
def test_stock_layers_lose_heads_of_self_and_cross_attention(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Stock().eval()
    context = Context(module, [_FEEDS], lambda model: pytest.fail("no session is needed"))
    heads = {0: (1,), 1: (0, 1, 2, 3), 2: (0, 1, 3), 3: (2, 3)}
    text = ";".join(f"{layer}:{','.join(map(str, each))}" for layer, each in heads.items())
    pruned, coverage = PruneHeads(heads=text, context=context).apply(module)
    reference = copy.deepcopy(module)
    layers = [layer for layer in reference.modules() if isinstance(layer, nn.MultiheadAttention)]
    given = [torch.from_numpy(array) for array in _FEEDS.values()]
    previous = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(fast)
        with torch.no_grad():
            for layer, each in heads.items():
                layers[layer].out_proj.weight.copy_(without(layers[layer], each).out_proj.weight)
            # Behind seven norms, sums in another order are worth 1e-5.
            assert (pruned(*given) - reference(*given)).abs().max() <= 1e-5
            assert (pruned(*given) - module(*given)).abs().max() >= 1e-2
    finally:
        torch.backends.mha.set_fastpath_enabled(previous)
    assert coverage.kept == ((0, (0, 2, 3)), (1, ()), (2, (2,)), (3, (0, 1)))


def test_attention_with_keys_of_its_own_is_left_and_named() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.odd = attention(batch_first=True), attention(batch_first=True, add_zero_attn=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.plain(x, x, x)[0]
            out: Tensor = self.odd(x, x, x)[0]
            return out

    context = Context(Two(), [{"x": _FEEDS["x"]}], lambda model: pytest.fail("no session is needed"))
    _, coverage = PruneHeads(ratio=0.5, context=context).apply(Two().eval())
    assert (coverage.done, coverage.of) == (2, 4)
    assert [left.name for left in coverage.left] == ["odd"] and "add_zero_attn" in coverage.left[0].reason
    with pytest.raises(PassError, match=r"layer 1 \(odd\): it has more than heads"):
        PruneHeads(heads="1:0", context=context).apply(Two().eval())
