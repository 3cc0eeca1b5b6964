"""Fake quantization: float32 values rounded to those that the 8-bit graph of `dynamic_int8` computes with.

w' = s_w round(w / s_w)                   s_w = max|w| / 127 for each output channel, and for each row of a table
x' = s_x (q_x - z), q_x in [0, 255]       s_x, z by the range of the whole padded tensor (ONNX, DynamicQuantizeLinear)

The product of x' and w' in float32 is that of the integers but for the order of its sums. Gradients pass the rounding
as if it weren't there (Jacob et al. 2018).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tx_export import plugins
from tx_export.errors import PassError, PluginError
from tx_export.models.parts.biases import RelativeBias
from tx_export.models.parts.causal import CausalSelfAttention
from tx_export.models.parts.decoder import GluFeedForward
from tx_export.models.parts.positions import SinusoidalPositions
from tx_export.models.parts.turned import TurnedLinear
from tx_export.passes import Pipeline
from tx_export.quantize.dynamic_int8 import DynamicInt8

__all__ = ["fake_quantized", "read_arithmetic", "rounded_activation", "rounded_rows"]

_NOT_MODULES = (nn.MultiheadAttention, CausalSelfAttention, GluFeedForward, TurnedLinear)
_MODELLED = ("per_channel", "embeddings", "min_elements")
_TINY = torch.finfo(torch.float32).tiny  # below it a scale has no reciprocal


def read_arithmetic(text: str) -> DynamicInt8:
    """The pass that a model is trained for, from its text form; PluginError for one that can't be imitated."""
    items = Pipeline.parse(text, lambda name: plugins.find("pass", name)).passes
    if len(items) != 1 or not isinstance(items[0], DynamicInt8):
        raise PluginError(f"qat {text!r}: only the arithmetic of dynamic_int8 can be trained for")
    changed = [name for name, option in items[0].options().items() if getattr(items[0], name) != option.default]
    if other := sorted(set(changed) - set(_MODELLED)):
        raise PluginError(f"qat {text!r}: training has no {', '.join(other)}; it has {', '.join(_MODELLED)}")
    return items[0]


def fake_quantized(module: nn.Module, arithmetic: DynamicInt8) -> nn.Module:
    """A copy with the same parameters by the same names, whose products and lookups round as the pass does.

    PassError for layers whose products are no modules.
    """
    copied = copy.deepcopy(module)
    for name, layer in copied.named_modules():
        if isinstance(layer, _NOT_MODULES):
            raise PassError(
                f"{name} is of the class {type(layer).__name__}, whose products can't be rounded one by one"
            )
    if arithmetic.embeddings:
        for lookup, elements in list(_lookups(copied)):
            if elements >= arithmetic.min_elements:
                lookup.register_forward_hook(_round_output)
    swaps = {
        layer: _RoundedLinear(layer, arithmetic.per_channel)
        for layer in copied.modules()
        if isinstance(layer, nn.Linear)
    }
    for path, layer in list(copied.named_modules(remove_duplicate=False)):
        if layer in swaps and path:
            parent, _, name = path.rpartition(".")
            setattr(copied.get_submodule(parent), name, swaps[layer])
    return swaps.get(copied, copied)  # type: ignore[call-overload, no-any-return]


def _lookups(module: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """What reads rows of a table, and the size of that table in the graph."""
    biases = [layer for layer in module.modules() if isinstance(layer, RelativeBias)]
    for bias in biases:  # the graph holds the rows of all distances
        yield bias.table, bias.buckets.numel() * bias.table.embedding_dim
    spread = {bias.table for bias in biases}
    for layer in module.modules():
        if isinstance(layer, nn.Embedding) and layer not in spread:
            yield layer, layer.weight.numel()
        if isinstance(layer, SinusoidalPositions):
            yield layer, layer.table.numel()


def _round_output(_layer: nn.Module, _given: object, rows: Tensor) -> Tensor:
    return rounded_rows(rows)


class _RoundedLinear(nn.Module):
    """x' w' + bias, with the parameters of a Linear."""

    def __init__(self, linear: nn.Linear, per_channel: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.per_channel = linear.weight, linear.bias, per_channel
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight if self.per_channel else self.weight.flatten()[None]
        return nn.functional.linear(rounded_activation(x), rounded_rows(rows).view_as(self.weight), self.bias)


def rounded_rows(x: Tensor) -> Tensor:
    """Each row of x [..., K] in steps of its largest magnitude / 127."""
    rows = x.flatten(0, -2)
    scale = _usable(rows.detach().abs().amax(dim=1) / 127)
    zeros = torch.zeros_like(scale, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(rows, scale, zeros, 0, -127, 127).view_as(x)


def rounded_activation(x: Tensor) -> Tensor:
    """All of x in 255 steps over its range, which includes zero."""
    low, high = x.detach().aminmax()
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = _usable((high - low) / 255)
    zero = (-low / scale).round().clamp(0, 255).to(torch.int32)
    return torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255)


def _usable(scale: Tensor) -> Tensor:
    """1 where there are only zeros, or numbers too near to it."""
    return torch.where(scale < _TINY, 1.0, scale)
