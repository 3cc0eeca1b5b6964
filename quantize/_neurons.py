"""The feed-forward layers of a module, in order, and how one is left with some of its neurons."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from tx_export.models.parts.decoder import GluFeedForward
from tx_export.models.parts.layers import FeedForward, GatedFeedForward
from tx_export.models.parts.turned import TurnedFeedForward
from tx_export.quantize._units import Linear, Numbers, Units, inputs_axis, kept_columns, kept_rows, made_by

__all__ = ["neurons_of", "without_neurons"]

_Stock = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
_Layer = FeedForward | GatedFeedForward | GluFeedForward | TurnedFeedForward | _Stock


def _layers(module: nn.Module) -> dict[str, _Layer]:
    """By name; one that stands at several places is there once."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, _Layer)}


def _products(layer: _Layer) -> tuple[tuple[Linear, ...], Linear]:
    """Those up, of which one may be two side by side, and that down."""
    if isinstance(layer, _Stock):
        return (layer.linear1,), layer.linear2
    return (layer.gate, layer.up) if isinstance(layer, GluFeedForward) else (layer.up,), layer.down


def neurons_of(module: nn.Module) -> list[Units]:
    """The neurons of each feed-forward layer."""
    return [_units(name, *_products(layer)) for name, layer in _layers(module).items()]


def _units(name: str, ups: tuple[Linear, ...], down: Linear) -> Units:
    made = [tensor for up in ups for tensor in made_by(up)]
    values = tuple(part for tensor in made for part in torch.split(tensor, down.in_features))
    return Units(name, down.in_features, down.weight, values, inputs_axis(down))


def without_neurons(module: nn.Module, removed: Mapping[str, Numbers]) -> nn.Module:
    """A copy in which the named layers lack these neurons."""
    copied = copy.deepcopy(module)
    layers = _layers(copied)
    for name, numbers in removed.items():
        ups, down = _products(layers[name])
        stays = torch.ones(down.in_features, dtype=torch.bool)
        stays[list(numbers)] = False
        for up in ups:
            kept_rows(up, stays.repeat(up.out_features // down.in_features).nonzero()[:, 0])
        kept_columns(down, stays.nonzero()[:, 0])
    return copied
