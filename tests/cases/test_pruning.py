"""Cases of head pruning: what is removed, that the rest answers as if it were masked, and what a report says of it."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file

from tx_export.compiler import BuildOptions, build, compare
from tx_export.errors import BudgetError, LoadError
from tx_export.load import load
from tx_export.metrics import fidelity_bound
from tx_export.passes import Context
from tx_export.quantize.prune_heads import PruneHeads
from tx_export.runtime import Model, read_manifest
from tx_export.spec import EagerModel
from tx_export.verify import default_lines, eager_runner, text_feeds

from .conftest import Once
from .models import build_from, user

Feeds = dict[str, np.ndarray]
Heads = Mapping[int, Sequence[int]]

_UNEVEN: Heads = {0: (2,), 1: (0, 1, 3)}  # 3 heads and 1 stay
_UNEVEN_TEXT = "0:2;1:0,1,3"
_ATTENTION = {"Attention", "MultiHeadAttention", "QAttention"}


@pytest.fixture(scope="module")
def classifier(cls_weights: Path) -> EagerModel:
    return load("classifier", weights=str(cls_weights))


@pytest.fixture(scope="session")
def uneven(once: Once, cls_weights: Path) -> Path:
    return once("cls-uneven", lambda folder: build_from(cls_weights, folder, prune_heads=_UNEVEN_TEXT))


def masked(model: EagerModel, heads: Heads) -> torch.nn.Module:
    """The untouched module, but that the product behind the heads multiplies what comes from these by 0."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        for layer, each in heads.items():
            weight: Any = module.encoder.layers[layer].attention.output.weight  # type: ignore[union-attr, index]
            for head in each:
                weight[:, 24 * head : 24 * (head + 1)] = 0
    return module


def pruned(model: EagerModel, text: str) -> tuple[torch.nn.Module, str]:
    """And the options that repeat it."""
    context = Context(model.module, text_feeds(model, default_lines()[:40]), lambda graph: pytest.fail("no session"))
    module, coverage = dataclasses.replace(PruneHeads.parse(text), context=context).apply(model.module)
    return module, str(*coverage.repeat).partition("{")[2].removesuffix("}")


def texts(model: EagerModel) -> Feeds:
    return text_feeds(model, default_lines()[:16])[-1]


def random_inputs(count: int) -> Feeds:
    random = np.random.default_rng(1)
    ids = random.integers(0, 1000, (count, 24))
    mask = (np.arange(24) < random.integers(3, 25, count)[:, None]).astype(np.int64)
    return {"input_ids": ids, "attention_mask": mask}


def test_b145_a_layer_without_heads_is_its_output_bias(
    cls_weights: Path, classifier: EagerModel, tmp_path: Path
) -> None:
    folder = build_from(cls_weights, tmp_path / "out", prune_heads="1:0,1,2,3")
    manifest, feeds = read_manifest(folder), texts(classifier)
    expected = eager_runner(classifier, masked(classifier, {1: (0, 1, 2, 3)}))(feeds)["logits"]
    assert np.abs(Model(folder).run_arrays(feeds)["logits"] - expected).max() <= 1e-5
    assert manifest["kept_heads"] == {"0": [0, 1, 2, 3], "1": []}
    assert (manifest["fused"]["done"], manifest["pruned"]["done"]) == (1, 4)


def test_b146_layers_with_other_numbers_of_heads_stay_within_bounds_in_fp32(
    uneven: Path, classifier: EagerModel
) -> None:
    manifest, feeds = read_manifest(uneven), texts(classifier)
    assert manifest["heads_per_layer"] == [3, 1]
    assert manifest["kept_heads"] == {"0": [0, 1, 3], "1": [2]}
    expected = eager_runner(classifier, masked(classifier, _UNEVEN))(feeds)["logits"]
    assert np.abs(Model(uneven).run_arrays(feeds)["logits"] - expected).max() <= 1e-5
    whole = eager_runner(classifier)(feeds)["logits"]
    assert np.abs(expected - whole).max() >= 1e-2  # the heads matter


def test_b146_layers_with_other_numbers_of_heads_stay_within_bounds_in_int8(
    cls_weights: Path, classifier: EagerModel, tmp_path: Path
) -> None:
    folder = build_from(cls_weights, tmp_path / "out", "dynamic_int8", prune_heads=_UNEVEN_TEXT)
    assert read_manifest(folder)["heads_per_layer"] == [3, 1]
    feeds = random_inputs(200)
    expected = eager_runner(classifier, masked(classifier, _UNEVEN))(feeds)["logits"]
    found = Model(folder).run_arrays(feeds)["logits"]
    cosine = (found * expected).sum(axis=1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.min() >= 0.99
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).mean() >= 0.95
    assert compare(folder, str(cls_weights))["verdict"] == "pass"


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("head", [0, 1, 2, 3])
def test_b147_a_pruned_head_is_a_masked_one(layer: int, head: int, classifier: EagerModel) -> None:
    module, _ = pruned(classifier, f"heads={layer}:{head}")
    feeds = texts(classifier)
    found = eager_runner(classifier, module)(feeds)["logits"]
    expected = eager_runner(classifier, masked(classifier, {layer: (head,)}))(feeds)["logits"]
    assert np.abs(found - expected).max() <= 1e-5
    assert np.abs(found - eager_runner(classifier)(feeds)["logits"]).max() >= 1e-3


def test_b149_the_recipe_of_a_pruned_artifact_makes_it_again_in_another_process(
    uneven: Path, cls_weights: Path, tmp_path: Path
) -> None:
    command = ["-m", "tx_export", "build", "classifier", "--weights", str(cls_weights), "-o", str(tmp_path / "again")]
    done = subprocess.run(
        [sys.executable, *command, "--passes", read_manifest(uneven)["pipeline"]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    again, before = read_manifest(tmp_path / "again"), read_manifest(uneven)
    assert again["files"]["model.onnx"] == before["files"]["model.onnx"]
    assert again["kept_heads"] == before["kept_heads"]


def test_b149_pruned_weights_fit_the_pruned_module_bit_by_bit_and_the_whole_one_says_what_differs(
    classifier: EagerModel, cls_weights: Path, tmp_path: Path
) -> None:
    module, repeat = pruned(classifier, f"heads={_UNEVEN_TEXT}")
    saved = module.state_dict()
    header = {"config": json.dumps(dict(classifier.config))}
    save_file(saved, tmp_path / "pruned.safetensors", header)
    again, _ = pruned(classifier, repeat)
    again.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in saved.items()})
    again.load_state_dict(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in again.state_dict().items())
    (tmp_path / "tokenizer.json").write_bytes(cls_weights.with_name("tokenizer.json").read_bytes())
    with pytest.raises(LoadError, match=r"encoder\.layers\.0\.attention\.\S+ .*72.*96"):
        load("classifier", weights=str(tmp_path / "pruned.safetensors"))


def test_b155_exactly_the_parameters_of_the_heads_are_gone(
    uneven: Path, cls_artifact: Path, classifier: EagerModel
) -> None:
    module, _ = pruned(classifier, "heads=0:2")
    counts = [sum(parameter.numel() for parameter in each.parameters()) for each in (classifier.module, module)]
    assert counts[0] - counts[1] == 9288 == 3 * (96 * 24 + 24) + 24 * 96
    sizes = [(folder / "model.onnx").stat().st_size for folder in (cls_artifact, uneven)]
    # Names and attributes may differ by a few bytes a node.
    assert abs(sizes[0] - sizes[1] - 4 * 4 * 9288) <= 1000


def test_b156_pruned_layers_are_fused_with_their_own_number_of_heads(uneven: Path) -> None:
    nodes = [node for node in onnx.load(uneven / "model.onnx").graph.node if node.op_type in _ATTENTION]
    counts = [next(item.i for item in node.attribute if item.name == "num_heads") for node in nodes]
    manifest = read_manifest(uneven)
    assert counts == [3, 1] == manifest["heads_per_layer"]
    assert (manifest["fused"]["done"], manifest["fused"]["of"], manifest["fused"]["left"]) == (2, 2, [])


def test_b156_so_are_those_of_torch_s_own_encoder(tmp_path: Path) -> None:
    folder = build(
        BuildOptions(source=user("Stock"), quantize="none", prune_heads=_UNEVEN_TEXT, output=tmp_path / "out")
    )
    manifest = read_manifest(folder)
    assert manifest["heads_per_layer"] == [3, 1] and manifest["fused"]["left"] == []
    (pruned,) = manifest["verification"]["passes"][-1]["outputs"].values()  # beside eager without these heads
    (whole,) = manifest["verification"]["whole"]["outputs"].values()
    assert pruned["max_abs"] <= fidelity_bound(0) < 1e-2 < whole["max_abs"]


@pytest.mark.parametrize(("percent", "asked", "removed"), [(10, 1, 1), (30, 2, 2), (50, 4, 4), (99, 8, 6), (100, 8, 6)])
def test_b157_a_share_is_rounded_to_the_nearest_and_a_layer_keeps_a_head(
    percent: int, asked: int, removed: int, classifier: EagerModel
) -> None:
    context = Context(classifier.module, text_feeds(classifier, default_lines()[:40]), lambda graph: pytest.fail("no"))
    runs = [PruneHeads(ratio=percent / 100, context=context).apply(classifier.module)[1] for _ in range(2)]
    assert runs[0] == runs[1]
    assert math.floor(percent / 100 * 8 + 0.5) == asked
    assert (runs[0].done, runs[0].of) == (removed, 8)
    assert all(heads for _, heads in runs[0].kept)
    told = [left.reason for left in runs[0].left]
    assert told == ([] if removed == asked else [f"{asked} of 8 were asked for, {removed} removed: a layer keeps one"])


def test_b157_the_report_says_how_many_were_asked_for_and_removed(cls_weights: Path, tmp_path: Path) -> None:
    folder = build_from(cls_weights, tmp_path / "out", prune_heads="0.99")
    report = (folder / "REPORT.md").read_text()
    assert "- pruned: 6 of 8\n  - left: heads (8 of 8 were asked for, 6 removed: a layer keeps one)\n" in report
    assert "prune_heads{ratio=0.99, heads=" in report and "| against the whole model | drift: none |" in report
    assert read_manifest(folder)["heads_per_layer"] == [1, 1]


def test_b157_what_pruning_costs_can_be_bounded(cls_weights: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"whole: output 'logits': sqnr_db .* is less than 60"):
        build_from(cls_weights, tmp_path / "out", prune_heads="0.99", budget="sqnr_db=60")
    assert not (tmp_path / "out").exists()
