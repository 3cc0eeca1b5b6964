"""Pruned decoders are the whole ones with those units zeroed: eager, and as a graph that is read through its cache."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tx_export import plugins
from tx_export._cached_form import cached_form
from tx_export._judged_passes import context_of, run_module_passes
from tx_export.errors import PassError
from tx_export.export import Target, export
from tx_export.models.gpt2 import Gpt2
from tx_export.models.lm import Lm
from tx_export.models.parts.turned import TurnedLinear
from tx_export.models.qwen3 import Qwen3
from tx_export.models.seq2seq import Seq2seq
from tx_export.passes import Pipeline
from tx_export.quantize._heads import attentions
from tx_export.spec import EagerModel, ModelSpec
from tx_export.testing import eager_model
from tx_export.verify import grid

Heads = Mapping[int, Sequence[int]]

_BOUND = 1e-5  # the order of sums of a few dozen float32 products changes, nothing else
_SMALL: dict[str, Any] = {"vocab_size": 99, "d_model": 32, "num_layers": 2, "d_ff": 48, "max_length": 40}
_GROUPED: dict[str, Any] = {**_SMALL, "num_heads": 8, "num_kv_heads": 2, "head_dim": 8}
_QWEN: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8}
_MODELS: dict[str, tuple[Callable[[], ModelSpec], Heads]] = {
    "groups": (lambda: Lm(**_GROUPED), {0: (4, 5, 6, 7), 1: (0, 1, 2, 3)}),
    "as many of each group": (lambda: Lm(**_GROUPED), {0: (0, 7), 1: (1, 2, 4, 6)}),
    "a group, and as many of the others": (lambda: Lm(**{**_GROUPED, "num_kv_heads": 4}), {1: (0, 1, 2, 5, 7)}),
    "a bias for each head": (lambda: Lm(**_SMALL, num_heads=4, positions="alibi"), {0: (1,), 1: (0, 3)}),
    "normed heads": (
        lambda: Qwen3(**_QWEN, vocab_size=99, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=40),
        {1: (2, 3)},
    ),
    "packed and turned": (
        lambda: Gpt2(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=40),
        {0: (1,), 1: (0, 2, 3)},
    ),
    # The encoder's layers, then self-attention and cross-attention of each layer of the decoder.
    "encoder-decoder": (lambda: Seq2seq(**_SMALL, num_heads=4), {0: (1, 2), 2: (0,), 3: (1, 2, 3), 5: (0, 1)}),
}


def _model(name: str) -> EagerModel:
    torch.manual_seed(0)
    spec = _MODELS[name][0]()
    plain = eager_model(spec.build(), spec.inputs(), spec.outputs(), task=spec.task)
    with torch.no_grad():
        for parameter in plain.module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # no bias is zero, no norm a plain one
    return dataclasses.replace(plain, cache=spec.cache(), generation=spec.generation())


def _pruned(model: EagerModel, text: str) -> EagerModel:
    pipeline = Pipeline.parse(text, lambda name: plugins.find("pass", name))
    return run_module_passes(model, pipeline, frozenset(), context_of(model, (), "cpu"), lambda line: None)[0]


def _text(heads: Heads) -> str:
    listed = ";".join(f"{layer}:{','.join(map(str, each))}" for layer, each in heads.items())
    return f"prune_heads{{heads={listed}}}"


@torch.no_grad()
def _masked(model: EagerModel, heads: Heads) -> nn.Module:
    """A copy whose output products multiply what comes from these heads by 0."""
    copied = copy.deepcopy(model.module)
    layers: list[Any] = list(attentions(copied).values())
    for layer, each in heads.items():
        output: Any = layers[layer].output
        weight = output.weight if isinstance(output, TurnedLinear) else output.weight.T
        for head in each:
            weight[head * layers[layer].head_dim : (head + 1) * layers[layer].head_dim] = 0
    return copied


def _feeds(model: EagerModel) -> dict[str, np.ndarray]:
    return dict(next(case.feeds for case in grid(model, 17) if case.shape == (5, 17) and case.mask == "ragged"))


@torch.no_grad()
def _logits(model: EagerModel, module: nn.Module) -> np.ndarray:
    feeds = _feeds(model)
    found: np.ndarray = module(*(torch.from_numpy(feeds[tensor.name]) for tensor in model.inputs)).numpy()
    return found


@pytest.mark.parametrize("name", _MODELS)
def test_heads_pruned_from_a_decoder_are_as_if_their_outputs_were_zero(name: str) -> None:
    model, heads = _model(name), _MODELS[name][1]
    pruned, masked = _pruned(model, _text(heads)), _logits(model, _masked(model, heads))
    scale = max(1.0, float(np.abs(masked).max()))
    assert np.abs(_logits(model, pruned.module) - masked).max() <= _BOUND * scale
    assert np.abs(_logits(model, model.module) - masked).max() >= 1e-3 * scale


@pytest.mark.parametrize("name", ["groups", "encoder-decoder"])
def test_a_pruned_graph_has_a_smaller_cache_and_answers_through_it_as_the_masked_module(name: str) -> None:
    model = _model(name)
    heads: Heads = {**_MODELS[name][1], 1: ()} if name == "groups" else _MODELS[name][1]
    pruned = _pruned(model, _text({layer: each for layer, each in heads.items() if each}))
    assert pruned.cache is not None
    assert pruned.cache.by_layer == ((1, 2) if name == "groups" else (3, 4))
    graph = export(cached_form(pruned), Target.parse(None, "fused"))
    shapes = {str(value.name): value.shape for value in graph.graph.inputs if value.shape is not None}
    assert tuple(shapes[f"past.{layer}.key"][1] for layer in (0, 1)) == pruned.cache.by_layer
    if name == "encoder-decoder":
        assert tuple(shapes[f"cross.{layer}.value"][1] for layer in (0, 1)) == (1, 2)
    masked = _logits(model, _masked(model, heads))
    found = context_of(pruned, (), "cpu").open(graph)(_feeds(model))["logits"]
    assert np.abs(found - masked).max() <= _BOUND * max(1.0, float(np.abs(masked).max()))


def test_b152_one_head_of_a_group_is_refused_and_a_whole_group_goes_with_its_key_and_value_head() -> None:
    model = _model("groups")
    with pytest.raises(PassError, match=r"layer 0 \(layers\.0\.attention\): each 4 query heads .* 0,1,2,3, or as many"):
        _pruned(model, "prune_heads{heads=0:5}")
    pruned = _pruned(model, "prune_heads{heads=0:4,5,6,7}")
    layer: Any = pruned.module.layers[0].attention  # type: ignore[union-attr, index]
    assert (layer.num_heads, layer.num_kv_heads) == (4, 1)
    assert layer.query.out_features == 4 * 8 and layer.key.out_features == layer.value.out_features == 8
    masked = _logits(model, _masked(model, {0: (4, 5, 6, 7)}))
    assert np.abs(_logits(model, pruned.module) - masked).max() <= _BOUND * max(1.0, float(np.abs(masked).max()))


def test_attention_with_a_cache_keeps_a_head() -> None:
    with pytest.raises(PassError, match="attention with a cache keeps at least one head"):
        _pruned(_model("packed and turned"), "prune_heads{heads=1:0,1,2,3}")


@pytest.mark.parametrize(("ratio", "kept"), [(0.25, 12), (0.9, 8)])
def test_a_share_of_the_heads_is_one_of_whole_groups_and_a_layer_keeps_one(ratio: float, kept: int) -> None:
    pruned = _pruned(_model("groups"), f"prune_heads{{ratio={ratio}}}")
    layers: list[Any] = list(attentions(pruned.module).values())
    assert sum(layer.num_heads for layer in layers) == kept
    assert all(layer.num_heads == 4 * layer.num_kv_heads for layer in layers)


@pytest.mark.parametrize("name", ["normed heads", "packed and turned"])
def test_neurons_pruned_from_gated_and_from_turned_layers_are_as_if_they_were_zero(name: str) -> None:
    model = _model(name)
    pruned = _pruned(model, "prune_ffn{neurons=0:5;1:8000}")  # 0 and 2 of layer 0, 15 of layer 1
    masked = copy.deepcopy(model.module)
    with torch.no_grad():
        for layer, neurons in ((0, (0, 2)), (1, (15,))):
            down: Any = masked.layers[layer].feed_forward.down  # type: ignore[union-attr, index]
            weight = down.weight if isinstance(down, TurnedLinear) else down.weight.T
            weight[list(neurons)] = 0
    expected = _logits(model, masked)
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(_logits(model, pruned.module) - expected).max() <= _BOUND * scale
    assert np.abs(_logits(model, model.module) - expected).max() >= 1e-4 * scale
    before, after = (sum(each.numel() for each in module.parameters()) for module in (model.module, pruned.module))
    a_neuron = 3 * 32 if name == "normed heads" else 2 * 32 + 1
    assert before - after == 3 * a_neuron
