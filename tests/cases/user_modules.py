"""Modules as users write them, with masks, positions and shapes of every kind; compiled as `user_modules.py:NAME`."""

from __future__ import annotations

import math

import torch
from einops import rearrange
from einops.layers.torch import Rearrange
from torch import Tensor, nn
from torch.nn import functional

_IDS = "input_ids:int64[batch,tokens<=128]{0..999}"
_MASK = "attention_mask:int64[batch,tokens<=128]"


class Words(nn.Module):
    """ids [B, T] -> [B, T, 96]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 96)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.words(ids)
        return out


class Stock(nn.Module):
    """nn.TransformerEncoder with a padding mask."""

    norm_first = False

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()
        layer = nn.TransformerEncoderLayer(96, 4, 192, batch_first=True, norm_first=self.norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    @staticmethod
    def tx_inputs() -> list[str]:
        return [_IDS, _MASK]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.encoder(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        return out


class StockNormFirst(Stock):
    """The same with its norms in front."""

    norm_first = True


class StockUnmasked(nn.Module):
    """One layer of it, norm first and without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()
        self.layer = nn.TransformerEncoderLayer(96, 4, 192, batch_first=True, norm_first=True)

    @staticmethod
    def tx_inputs() -> list[str]:
        return [_IDS]

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.layer(self.words(input_ids))
        return out


class SkipsFullMasks(Stock):
    """Leaves the mask out where nothing is padded: a branch on values."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        if attention_mask.bool().all():
            out: Tensor = self.encoder(x)
        else:
            out = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        return out


class WantsWeights(nn.Module):
    """nn.MultiheadAttention asked for its weights, as it is by default: NaN where a row is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = Words(), nn.MultiheadAttention(96, 4, batch_first=True)

    @staticmethod
    def tx_inputs() -> list[str]:
        return [_IDS, _MASK]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        out: Tensor = self.attention(x, x, x, key_padding_mask=attention_mask == 0)[0]
        return out


class Loss(Stock):
    """Gives a number beside its states."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = super().forward(input_ids, attention_mask)
        return hidden.square().mean(), hidden


class Causal(nn.Module):
    """Causal attention with learned positions, and a head on the last token by a negative index."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = Words(), nn.Embedding(128, 96)
        self.qkv, self.output = nn.Linear(96, 288), nn.Linear(96, 96)
        self.head = nn.Linear(96, 3)

    @staticmethod
    def tx_inputs() -> list[str]:
        return [_IDS]

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions.weight[: ids.shape[1]]
        q, k, v = rearrange(self.qkv(x), "b t (n h d) -> n b h t d", n=3, h=4)
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.output(rearrange(context, "b h t d -> b t (h d)"))
        return out

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.hidden(input_ids)


class LastToken(nn.Module):
    """A class from the last real token of rows that are padded on the right."""

    def __init__(self) -> None:
        super().__init__()
        self.causal = Causal()

    @staticmethod
    def tx_inputs() -> list[str]:
        return [_IDS, _MASK]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.causal(input_ids)
        last = attention_mask.sum(dim=1).clamp(min=1) - 1
        out: Tensor = self.causal.head(hidden[torch.arange(hidden.shape[0]), last])
        return out


class FirstFromTheEnd(Causal):
    """A class from the position -1."""

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(input_ids)[:, -1])
        return out


class Ranks(nn.Module):
    """One meaning of a mask, given to attention with 2, 3 and 4 axes; all answers are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()
        self.qkv = nn.Linear(96, 288)

    @staticmethod
    def tx_inputs() -> list[str]:
        return [_IDS, _MASK]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        batch, tokens = input_ids.shape
        q, k, v = rearrange(self.qkv(self.words(input_ids)), "b t (n h d) -> n b h t d", n=3, h=4)
        real = attention_mask != 0
        masks = (
            real[:, None, None],  # [B, 1, 1, T]
            real[:, None, None].expand(batch, 1, tokens, tokens),
            real[:, None, None].expand(batch, 4, tokens, tokens),
            real[:, None, None].repeat(1, 4, tokens, 1),
            torch.zeros(batch, 1, 1, tokens).masked_fill(~real[:, None, None], -torch.inf),
        )
        return tuple(functional.scaled_dot_product_attention(q, k, v, mask) for mask in masks)


class DividesByLength(Causal):
    """Makes a Python number of the length."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.hidden(input_ids) / int(input_ids.shape[1])


class Einops(nn.Module):
    """Hand-written attention with einops, as a function and as a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()
        self.query, self.key, self.value = nn.Linear(96, 96), nn.Linear(96, 96), nn.Linear(96, 96)
        self.split = Rearrange("b n (h d) -> b h n d", h=4)

    @staticmethod
    def tx_inputs() -> list[str]:
        return [_IDS]

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        q, k, v = (
            self.split(self.query(x)),
            self.split(self.key(x)),
            rearrange(self.value(x), "b n (h d) -> b h n d", h=4),
        )
        weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(24), dim=-1)
        return rearrange(torch.einsum("bhij,bhjd->bhid", weights, v), "b h n d -> b n (h d)")


class GrowingTable(nn.Module):
    """Keeps its table of positions, and makes a larger one where a longer input comes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()
        self.table = torch.zeros(0, 96)

    @staticmethod
    def tx_inputs() -> list[str]:
        return [_IDS]

    def forward(self, input_ids: Tensor) -> Tensor:
        if input_ids.shape[1] > self.table.shape[0]:
            self.table = torch.arange(input_ids.shape[1])[:, None] / 10 ** (torch.arange(96) / 24)
        out: Tensor = self.words(input_ids) + self.table[: input_ids.shape[1]].sin()
        return out


class ComplexRotary(Causal):
    """Rotates queries and keys by complex numbers."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        q, k, v = rearrange(self.qkv(x), "b t (n h d) -> n b h t d", n=3, h=4)
        angles = torch.arange(ids.shape[1])[:, None] / 100 ** (torch.arange(12) / 12)
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (
            torch.view_as_real(torch.view_as_complex(each.unflatten(3, (12, 2))) * turn).flatten(3) for each in (q, k)
        )
        return rearrange(functional.scaled_dot_product_attention(q, k, v, is_causal=True), "b h t d -> b t (h d)")
