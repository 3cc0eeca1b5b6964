"""prune_ffn: the pruned module is the whole one with those neurons zeroed, for plain, gated and stock layers."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tx_export.errors import PassError, PluginError
from tx_export.models.parts.layers import FeedForward, GatedFeedForward
from tx_export.passes import Context
from tx_export.quantize import _neurons
from tx_export.quantize._units import kept_rows
from tx_export.quantize.prune_ffn import PruneFfn
from tx_export.testing import tiny_embedder
from tx_export.verify import default_lines, text_feeds

_BOUND = 1e-5  # sums of 32 float32 products near 1 in another order
_X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))


class Residual(nn.Module):
    """x + layer(x), twice, with layers that differ."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        out: Tensor = x + self.second(x)
        return out


_LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {  # how it is made, and its product down
    "plain": (lambda: FeedForward(16, 32, "gelu", 0.0), "down"),
    "gated": (lambda: GatedFeedForward(16, 32, nn.GELU(), 0.0, bias=False), "down"),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), "linear2"),
}


def context(module: nn.Module) -> Context:
    return Context(module, [{"x": _X.numpy()}], lambda model: pytest.fail("no session is needed"))


@pytest.mark.parametrize("kind", _LAYERS)
@pytest.mark.parametrize("importance", ["gradient", "norm"])
def test_the_pruned_module_is_the_whole_one_with_those_neurons_zeroed(kind: str, importance: str) -> None:
    make, down = _LAYERS[kind]
    torch.manual_seed(0)
    module = Residual(make).eval()
    pruned, coverage = PruneFfn(ratio=0.4, importance=importance, context=context(module)).apply(module)
    bits = {int(layer): int(mask, 16) for layer, mask in _pairs(str(*coverage.repeat))}
    reference = copy.deepcopy(module)
    for layer, name in enumerate(("first", "second")):
        gate = torch.tensor([float(not bits.get(layer, 0) >> neuron & 1) for neuron in range(32)])
        reference.get_submodule(f"{name}.{down}").register_forward_pre_hook(lambda _, given, gate=gate: given[0] * gate)
    with torch.no_grad():
        assert (pruned(_X) - reference(_X)).abs().max() <= _BOUND
        assert (pruned(_X) - module(_X)).abs().max() >= 1e-3
    left = [pruned.get_submodule(f"{name}.{down}").weight.shape[1] for name in ("first", "second")]  # type: ignore[index]
    assert sum(left) == 64 - 26 and (coverage.done, coverage.of) == (26, 64)  # 0.4 of 64 is 25.6


def _pairs(repeat: str) -> list[list[str]]:
    text = repeat.partition("neurons=")[2].partition(",")[0]
    return [item.split(":") for item in text.split(";")]


@pytest.mark.parametrize("importance", ["gradient", "norm"])
def test_the_neurons_that_matter_least_go_first(importance: str) -> None:
    model = tiny_embedder()
    faint = {0: (3, 17), 1: (5, 30, 31)}
    with torch.no_grad():
        for layer, neurons in faint.items():
            model.module.encoder.layers[layer].feed_forward.down.weight[:, list(neurons)] *= 1e-4  # type: ignore[union-attr, index]
            model.module.encoder.layers[layer].feed_forward.up.bias.fill_(3)  # type: ignore[union-attr, index]
    given = dataclasses.replace(context(model.module), feeds=text_feeds(model, default_lines()[:16]))
    _, coverage = PruneFfn(ratio=5 / 64, importance=importance, context=given).apply(model.module)
    expected = ";".join(f"{layer}:{sum(1 << n for n in neurons):x}" for layer, neurons in faint.items())
    assert f"neurons={expected}," in str(*coverage.repeat)


def test_the_choice_repeats_itself_and_one_neuron_of_each_layer_stays() -> None:
    module = Residual(_LAYERS["plain"][0]).eval()
    pruned, coverage = PruneFfn(ratio=1, context=context(module)).apply(module)
    assert (coverage.done, coverage.of) == (62, 64)
    assert coverage.left[0].reason == "64 of 64 were asked for, 62 removed: a layer keeps one"
    again = dataclasses.replace(
        PruneFfn.parse(str(*coverage.repeat).removeprefix("prune_ffn{").removesuffix("}")), context=context(module)
    )
    assert torch.equal(again.apply(module)[0](_X), pruned(_X))


def test_a_row_of_another_neuron_is_caught_by_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_neurons, "kept_rows", lambda linear, rows: kept_rows(linear, (rows + 1) % linear.out_features))
    module = Residual(_LAYERS["plain"][0]).eval()
    with pytest.raises(PassError, match=r"prune_ffn: output 0 of the pruned module is .* with the same units zeroed"):
        PruneFfn(ratio=0.5, context=context(module)).apply(module)


def test_a_module_whose_own_code_knows_the_width_is_refused() -> None:
    class Checks(FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x) + self.up(x).reshape(3, 5, 32).mean()
            return out

    module = Residual(lambda: Checks(16, 32, "relu", 0.0)).eval()
    with pytest.raises(PassError, match=r"the pruned module fails with RuntimeError: .*takes the old sizes for grant"):
        PruneFfn(ratio=0.5, context=context(module)).apply(module)


def test_what_has_no_neurons_and_what_is_no_option_is_refused() -> None:
    product = nn.Linear(16, 16)
    with pytest.raises(PassError, match="there is no feed-forward layer of ours and no stock layer of torch"):
        PruneFfn(ratio=0.5, context=context(product)).apply(product)
    with pytest.raises(PluginError, match="neurons: '0:xyz' is not LAYER:BITS, with bits in hexadecimal"):
        PruneFfn.parse("neurons=0:xyz")
    module = Residual(_LAYERS["plain"][0]).eval()
    with pytest.raises(PassError, match="layer 0 has not these neurons; the layers are 0 to 1"):
        PruneFfn(neurons=f"0:{1 << 32:x}", context=context(module)).apply(module)


def test_a_ratio_is_rounded_to_the_nearest_number_of_neurons() -> None:
    module = Residual(_LAYERS["plain"][0]).eval()
    for ratio, removed in ((0.0078, 0), (0.0079, 1), (0.5, 32), (0.99, 62)):
        _, coverage = PruneFfn(ratio=ratio, context=context(module)).apply(module)
        assert coverage.done == removed == min(math.floor(ratio * 64 + 0.5), 62)
        told = [left.reason for left in coverage.left]
        assert told == {
            0: ["0.0078 of 64 rounds to none"],
            62: ["63 of 64 were asked for, 62 removed: a layer keeps one"],
        }.get(removed, [])
