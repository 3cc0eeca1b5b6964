"""prune_weights: the smallest weights become zero, by the share or by the pattern, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tx_export.errors import PassError, PluginError
from tx_export.quantize.prune_weights import PruneWeights
from tx_export.testing import tiny_classifier


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return tiny_classifier().module


@pytest.mark.parametrize("options", [PruneWeights(0.3), PruneWeights(0.5), PruneWeights(pattern="2:4")], ids=str)
def test_what_is_zeroed_is_smaller_than_what_is_kept(options: PruneWeights, module: nn.Module) -> None:
    before = copy.deepcopy(module.state_dict())
    pruned, coverage = options.apply(module)
    zeros = 0
    for name, weight in pruned.state_dict().items():
        is_product = weight.ndim == 2 and "embedding" not in name
        if not is_product:
            assert torch.equal(weight, before[name])
            continue
        kept = weight != 0
        assert torch.equal(weight[kept], before[name][kept])
        groups = (weight.numel() // 4, 4) if options.pattern == "2:4" else (1, weight.numel())
        count = int(options.ratio * groups[1] + 0.5)
        assert ((~kept).view(groups).sum(dim=1) == count).all()
        old, gone = before[name].abs().view(groups), (~kept).view(groups)
        assert (old.masked_fill(~gone, 0).amax(dim=1) <= old.masked_fill(gone, torch.inf).amin(dim=1)).all()
        zeros += count * groups[0]
    assert coverage.done == zeros
    assert all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())


def test_the_report_says_what_it_does_not_save(module: nn.Module) -> None:
    _, coverage = PruneWeights().apply(module)
    assert "save nothing at run time, only in a compressed file" in coverage.left[0].reason


def test_tables_and_rows_that_do_not_divide_are_left_and_named() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.narrow, self.decoder = nn.Embedding(9, 8), nn.Linear(6, 8), nn.Linear(8, 9)
            self.decoder.weight = self.words.weight

    _, coverage = PruneWeights(pattern="2:4").apply(Tied())
    reasons = {left.name: left.reason for left in coverage.left}
    assert reasons["decoder.weight"] == "it is an embedding table too"
    assert reasons["narrow.weight"] == "its 6 inputs are no multiple of 4"
    assert (coverage.done, coverage.of) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("ratio=1.0", "ratio is 1.0; it must be between 0 and 1"),
        ("pattern=1:2", "pattern is '1:2'; known: unstructured, 2:4"),
        ("ratio=0.25, pattern=2:4", "pattern 2:4 is a ratio of 0.5, not 0.25"),
    ],
)
def test_options_that_make_no_sense_say_what_does(options: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        PruneWeights.parse(options)


def test_a_module_without_products_is_refused() -> None:
    with pytest.raises(PassError, match=r"there is no nn.Linear and no nn.MultiheadAttention"):
        PruneWeights().apply(nn.Embedding(4, 4))
