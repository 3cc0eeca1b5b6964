"""Cases of fusion: what was fused is counted, no level of optimization changes an answer, inner outputs stay."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from tx_export.artifact import open_graph, seal
from tx_export.compiler import BuildOptions, build
from tx_export.errors import TxExportError
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.metrics import fidelity_bound
from tx_export.optimize.fold_constants import FoldConstants
from tx_export.optimize.fuse_gelu import FuseGelu
from tx_export.optimize.pack_qkv import PackQkv
from tx_export.passes import Outcome
from tx_export.providers.cpu import Cpu
from tx_export.quantize.dynamic_int8 import DynamicInt8
from tx_export.runtime import Model, read_manifest
from tx_export.testing import eager_model
from tx_export.verify import eager_runner

from .conftest import Once
from .models import CLS

Feeds = dict[str, np.ndarray]
_OPTIMIZE = (FoldConstants(), FuseGelu(), PackQkv())


def feeds_of(batch: int, tokens: int) -> Feeds:
    """Random ids; the last row is padded on the right by half, the first holed."""
    ids = np.random.default_rng(batch * tokens).integers(5, 1000, (batch, tokens))
    mask = np.ones_like(ids)
    mask[-1, (tokens + 1) // 2 :] = 0
    mask[0, 1:-1:3] = 0
    return {"input_ids": ids, "attention_mask": mask}


_SHAPES = ((1, 1), (3, 16), (2, 128))


@pytest.mark.parametrize("kind", ["cls_artifact", "cls_int8", "hf_artifact"])
def test_b090_every_layer_of_ours_is_fused_and_the_report_counts_them(
    kind: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    manifest = read_manifest(folder)
    assert manifest["fused"] == {"done": 2, "of": 2, "left": []}
    assert "- fused: 2 of 2\n" in (folder / "REPORT.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("level", ["off", "basic", "extended", "all"])
def test_b091_no_level_of_optimization_changes_the_answer(
    cls_artifact: Path, cls_weights: Path, tmp_path: Path, level: str
) -> None:
    folder = Path(shutil.copytree(cls_artifact, tmp_path / level))
    manifest = read_manifest(folder)
    seal(folder, manifest | {"session": {"cpu": manifest["session"]["cpu"] | {"graph_optimization": level}}})
    eager = eager_runner(load("classifier", weights=str(cls_weights)))
    opened = Model(folder, threads=1)
    for shape in _SHAPES:
        expected = eager(feeds_of(*shape))["logits"]
        bound = fidelity_bound(float(np.abs(expected).max()))
        assert np.abs(opened.run_arrays(feeds_of(*shape))["logits"] - expected).max() <= bound


@pytest.mark.parametrize(
    ("width", "heads", "head_dim"),
    [(96, 3, 0), (100, 3, 32), (96, 1, 0)],
)
def test_b094_the_number_of_heads_is_the_models_own_whatever_the_width(width: int, heads: int, head_dim: int) -> None:
    spec = dataclasses.replace(CLS, num_layers=1, d_model=width, num_heads=heads, head_dim=head_dim)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = eager_model(spec.build(), spec.inputs(), spec.outputs(), family="classifier", task=spec.task)
    graph = export(model, Target.parse(None, "fused"))
    for item in _OPTIMIZE:
        item(graph)
    assert [n.attributes.get_int("num_heads", 0) for n in graph.graph if "Attention" in n.op_type] == [heads]
    run, eager = open_graph(graph, Cpu().session(), threads=1), eager_runner(model)
    for shape in _SHAPES:
        expected = eager(feeds_of(*shape))["logits"]
        bound = fidelity_bound(float(np.abs(expected).max()))
        assert np.abs(run(feeds_of(*shape))["logits"] - expected).max() <= bound


def optimized(graph: ir.Model) -> list[bool]:
    """Whether each optimization pass changed the graph."""
    outcomes = [item(graph) for item in _OPTIMIZE]
    assert all(isinstance(outcome, Outcome) for outcome in outcomes)
    return [outcome.modified for outcome in outcomes]


def test_b096_optimizing_an_artifact_again_changes_nothing_before_and_behind_quantizing(cls_artifact: Path) -> None:
    graph = ir.load(cls_artifact / "model.onnx")
    before = ir.to_proto(graph).SerializeToString(deterministic=True)
    assert optimized(graph) == [False, False, False]
    assert ir.to_proto(graph).SerializeToString(deterministic=True) == before
    DynamicInt8()(graph)
    quantized = open_graph(graph, Cpu().session(), threads=1)(feeds_of(3, 16))["logits"]
    assert optimized(graph) == [False, False, False]
    again = open_graph(graph, Cpu().session(), threads=1)(feeds_of(3, 16))["logits"]
    assert np.array_equal(again, quantized)
    outcome = DynamicInt8()(graph)
    assert not outcome.modified


_USER = """
import torch
from torch import nn

from tx_export.models.parts.layers import Encoder
from tx_export.models.parts.masks import key_mask


class Inside(nn.Module):
    '''A classifier around our encoder that gives the hidden states and attention weights of each layer too.'''

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder(
            vocab_size=1000, max_length=128, d_model=96, num_layers=2, num_heads=4, head_dim=24, d_ff=192, dropout=0.1,
            activation="gelu", norm="post", positions="learned", relative=(32, 128), epsilon=1e-5,
        )
        self.head = nn.Linear(96, 3)

    def forward(self, input_ids, attention_mask):
        hidden, weights = [], []
        keep = lambda _, given: hidden.append(given)
        hooks = [layer.register_forward_pre_hook(keep) for layer in self.encoder.layers]
        last = self.encoder(input_ids, attention_mask)
        for hook in hooks:
            hook.remove()
        for layer, given in zip(self.encoder.layers, hidden):
            weights.append(layer.attention.weights(given[0], given[0], given[1]))
        return {"logits": self.head(last[:, 0]), "hidden_states": [*(given[0] for given in hidden), last],
                "attentions": weights}


class Stock(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(1000, 96)
        layer = nn.TransformerEncoderLayer(96, 4, 192, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, input_ids, attention_mask):
        return self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)


class Foreign(nn.Module):
    def forward(self, x):
        if torch.onnx.is_in_onnx_export():
            return torch.onnx.ops.symbolic("acme::Twice", (x,), {}, dtype=x.dtype, shape=x.shape, version=1)
        return 2 * x
"""
_INPUTS = ("input_ids:int64[batch,tokens<=128]", "attention_mask:int64[batch,tokens<=128]")


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("fusion") / "fusion_of_a_user.py"
    file.write_text(_USER, encoding="utf-8")
    return file


def test_b090_a_stock_encoder_is_fused_in_every_layer(users: Path, once: Once) -> None:
    options = BuildOptions(source=f"{users}:Stock", inputs=_INPUTS, quantize="none")
    folder = once("stock", lambda output: build(dataclasses.replace(options, output=output)))
    assert read_manifest(folder)["fused"] == {"done": 2, "of": 2, "left": []}


def test_b097_hidden_states_and_attention_weights_are_outputs_beside_fused_attention(users: Path) -> None:
    model = load(f"{users}:Inside", inputs=_INPUTS)
    names = [spec.name for spec in model.outputs]
    assert names == ["logits", *(f"hidden_states.{i}" for i in range(3)), *(f"attentions.{i}" for i in range(2))]
    graph = export(model, Target.parse(None, "fused"))
    for item in _OPTIMIZE:
        item(graph)
    assert [value.name for value in graph.graph.outputs] == names
    assert sum("Attention" in node.op_type for node in graph.graph) == 2
    run, eager = open_graph(graph, Cpu().session(), threads=1), eager_runner(model)
    for shape in _SHAPES:
        found, expected = run(feeds_of(*shape)), eager(feeds_of(*shape))
        for name in names:
            bound = fidelity_bound(float(np.abs(expected[name]).max()))
            assert np.abs(found[name] - expected[name]).max() <= bound


def test_b078_an_operator_of_another_domain_is_refused_by_name(users: Path, tmp_path: Path) -> None:
    options = BuildOptions(
        source=f"{users}:Foreign", inputs=("x:float32[n]",), quantize="none", output=tmp_path / "a",
    )  # fmt: skip
    with pytest.raises(TxExportError, match=r"acme.*Twice"):
        build(options)
    assert not (tmp_path / "a").exists()
