"""Modules as users write them that half precision has broken; compiled as `half_modules.py:NAME`."""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor, nn

_IDS = "input_ids:int64[batch,tokens<=128]{0..999}"
_MASK = "attention_mask:int64[batch,tokens<=128]"


class Fills(nn.Module):
    """Attention by hand whose hidden scores become -1e9."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 96)
        self.qkv, self.output = nn.Linear(96, 288), nn.Linear(96, 96)
        self.norm = nn.LayerNorm(96)

    @staticmethod
    def tx_inputs() -> list[str]:
        return [_IDS, _MASK]

    def turn(self, x: Tensor) -> Tensor:
        return x

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        q, k, v = rearrange(self.qkv(x), "b t (n h d) -> n b h t d", n=3, h=4)
        scores = self.turn(q) @ self.turn(k).transpose(-2, -1) / math.sqrt(24)
        weights = scores.masked_fill(attention_mask[:, None, None] == 0, -1e9).float().softmax(dim=-1)
        out: Tensor = self.norm(x + self.output(rearrange(weights @ v, "b h t d -> b t (h d)")))
        return out


class Casts(Fills):
    """Rotary angles and softmax after `.float()`, and a cast back to the type of the weights."""

    def turn(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2]).float()[:, None] / 10000 ** (torch.arange(12).float() / 12)
        first, second = x.float().chunk(2, dim=-1)
        turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        return torch.cat(turned, dim=-1).type_as(x)


class RootMeanSquare(nn.Module):
    """A norm by hand over activations of a few hundred: their squares are over 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 96)
        self.up, self.down = nn.Linear(96, 192), nn.Linear(192, 96)

    @staticmethod
    def tx_inputs() -> list[str]:
        return [_IDS]

    def forward(self, input_ids: Tensor) -> Tensor:
        x = 300 * self.words(input_ids)
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-6)
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Features(nn.Module):
    """An encoder over numbers that aren't whole, whose inputs and outputs can be half themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(96, 4, 192, batch_first=True)
        self.head = nn.Linear(96, 3)

    @staticmethod
    def tx_inputs() -> list[str]:
        return ["x:float32[batch,tokens<=64,96]"]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x))
        return out
