"""Cases of dynamic int8: what an answer depends on, outlier channels, what is counted, and weights without a form."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tx_export.artifact import open_graph
from tx_export.compiler import BuildOptions, build
from tx_export.errors import LoadError, PassError
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.optimize.fold_constants import FoldConstants
from tx_export.optimize.fuse_gelu import FuseGelu
from tx_export.optimize.pack_qkv import PackQkv
from tx_export.passes import GraphPass, Outcome
from tx_export.providers.cpu import Cpu
from tx_export.quantize.dynamic_int8 import DynamicInt8
from tx_export.runtime import Model, read_manifest
from tx_export.spec import EagerModel
from tx_export.testing import eager_model
from tx_export.verify import eager_runner

from .models import CLS, save_hf

Feeds = dict[str, np.ndarray]
_OPTIMIZE = (FoldConstants(), FuseGelu(), PackQkv())
_RARE = 999  # a token that no other case uses


@pytest.fixture(scope="module")
def classifier(cls_weights: Path) -> EagerModel:
    return load("classifier", weights=str(cls_weights))


@pytest.fixture(scope="module")
def exported(classifier: EagerModel) -> onnx.ModelProto:
    """The classifier's graph, without any pass behind the export."""
    return ir.to_proto(export(classifier, Target.parse(None, "fused")))


def changed(model: EagerModel, change: Callable[[str, torch.Tensor], None]) -> nn.Module:
    """A copy of the module in which `change` has changed the parameters in place."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            change(name, parameter)
    return module


def graph_of(exported: onnx.ModelProto, module: nn.Module) -> ir.Model:
    """The exported graph with the parameters of another module of that class, which stand there by name."""
    graph = ir.from_proto(exported)
    for name, parameter in module.named_parameters():
        graph.graph.initializers[name].const_value = ir.tensor(parameter.detach().numpy().copy(), name=name)
    return graph


def passed(graph: ir.Model, passes: Sequence[GraphPass]) -> dict[str, tuple[int, int]]:
    """Run passes in order; how many each changed, of how many."""
    counts = {}
    for item in passes:
        outcome = item(graph)
        assert isinstance(outcome, Outcome)
        counts[item.name()] = (outcome.coverage.done, outcome.coverage.of)
    return counts


def answers(graph: ir.Model, feeds: Sequence[Feeds]) -> np.ndarray:
    run = open_graph(graph, Cpu().session(), threads=1)
    return np.concatenate([run(each)["logits"] for each in feeds])


def eager_answers(model: EagerModel, module: nn.Module, feeds: Sequence[Feeds]) -> np.ndarray:
    run = eager_runner(model, module)
    return np.concatenate([run(each)["logits"] for each in feeds])


def drawn(batch: int, tokens: int, seed: int) -> Feeds:
    ids = np.random.default_rng(seed).integers(5, _RARE, (batch, tokens))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def cosine(expected: np.ndarray, found: np.ndarray) -> float:
    """The least over rows."""
    sizes = np.linalg.norm(expected, axis=-1) * np.linalg.norm(found, axis=-1)
    return float(((expected * found).sum(-1) / sizes).min())


def agreement(expected: np.ndarray, found: np.ndarray) -> float:
    return float((expected.argmax(-1) == found.argmax(-1)).mean())


def test_b110_batch_mates_move_an_answer_but_not_its_label(classifier: EagerModel, exported: onnx.ModelProto) -> None:
    def change(name: str, parameter: torch.Tensor) -> None:
        if name == "encoder.embedding.weight":
            parameter[_RARE] *= 20

    graph = graph_of(exported, changed(classifier, change))
    passed(graph, (*_OPTIMIZE, DynamicInt8()))
    feeds = drawn(8, 16, 1)
    alone = answers(graph, [{name: array[:1] for name, array in feeds.items()}])
    feeds["input_ids"][7] = _RARE
    together = answers(graph, [feeds])[:1]
    assert np.abs(together - alone).max() > 0  # the one scale of the batch is the loud row's
    assert agreement(alone, together) == 1


def test_b110_that_it_depends_on_the_batch_stands_in_manifest_and_report(cls_int8: Path, cls_artifact: Path) -> None:
    manifest = read_manifest(cls_int8)
    assert manifest["batch_dependent"] is True and read_manifest(cls_artifact)["batch_dependent"] is False
    measured = manifest["verification"]["overall"]["invariance"]
    assert measured["batch"] > 0 and measured["padding"] > 0
    report = (cls_int8 / "REPORT.md").read_text(encoding="utf-8")
    assert "batch dependent" in report and f"batch {measured['batch']:.4g}." in report
    assert "batch dependent" not in (cls_artifact / "REPORT.md").read_text(encoding="utf-8")


def test_b111_padding_moves_an_answer_but_not_its_label(cls_int8: Path) -> None:
    ids = drawn(1, 16, 2)["input_ids"]
    found = []
    for tokens in (16, 64, 128):
        feeds = {name: np.zeros((1, tokens), np.int64) for name in ("input_ids", "attention_mask")}
        feeds["input_ids"][:, :16], feeds["attention_mask"][:, :16] = ids, 1
        found.append(Model(cls_int8, threads=1).run_arrays(feeds)["logits"])
    assert all(agreement(found[0], other) == 1 for other in found)
    assert f"padding {read_manifest(cls_int8)['verification']['overall']['invariance']['padding']:.4g}," in (
        cls_int8 / "REPORT.md"
    ).read_text(encoding="utf-8")


def test_b112_the_full_range_is_used_in_a_scheme_that_can_not_saturate_and_the_manifest_says_so(cls_int8: Path) -> None:
    # Weights have all of -127..127, not 7 bits: the setting makes the products exact where there is no VNNI, and the
    # runtime then gives a notice that they are slower.
    graph = ir.load(cls_int8 / "model.onnx").graph
    arrays = [
        value.const_value.numpy()
        for value in graph.initializers.values()
        if value.const_value is not None and value.dtype == ir.DataType.INT8
    ]
    stored = [array for array in arrays if array.ndim == 2]
    assert len(stored) >= 9 and all(np.abs(array.astype(int)).max() == 127 for array in stored)
    assert read_manifest(cls_int8)["session"]["cpu"]["config"] == {"session.x64quantprecision": "1"}


def test_b113_scales_per_channel_are_the_default_and_better_with_loud_channels(
    classifier: EagerModel, exported: onnx.ModelProto
) -> None:
    def change(name: str, parameter: torch.Tensor) -> None:
        if parameter.ndim == 2 and "embedding" not in name and "positions" not in name:
            parameter[1] *= 50

    module = changed(classifier, change)
    feeds = [drawn(50, 16, seed) for seed in range(4)]
    expected = eager_answers(classifier, module, feeds)
    found = {}
    for per_channel in (True, False):
        graph = graph_of(exported, module)
        passed(graph, (*_OPTIMIZE, DynamicInt8(per_channel=per_channel)))
        found[per_channel] = answers(graph, feeds)
    assert DynamicInt8().per_channel is True
    assert cosine(expected, found[True]) >= cosine(expected, found[False])
    assert agreement(expected, found[True]) >= max(agreement(expected, found[False]), 0.95)


def test_b113_int8_of_the_classifier_is_within_the_bound_of_the_cases(
    classifier: EagerModel, exported: onnx.ModelProto
) -> None:
    feeds = [drawn(50, 16, seed) for seed in range(4)]
    expected = eager_answers(classifier, classifier.module, feeds)
    graph = ir.from_proto(exported)
    passed(graph, (*_OPTIMIZE, DynamicInt8()))
    found = answers(graph, feeds)
    assert cosine(expected, found) >= 0.99 and agreement(expected, found) >= 0.95


def test_b119_linear_layers_that_export_as_gemm_with_a_turned_weight_are_quantized() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(96, 37), nn.ReLU(), nn.Linear(37, 5))
    model = eager_model(module, ["x:float32[rows,96]"], ["logits:float32[rows,5]"])
    graph = export(model, Target.parse(None, "fused"))
    forms = [(node.op_type, node.attributes.get_int("transB", 0)) for node in graph.graph if node.op_type == "Gemm"]
    assert forms == [("Gemm", 1)] * 2
    assert passed(graph, [DynamicInt8()]) == {"dynamic_int8": (2, 2)}
    feeds = [{"x": np.random.default_rng(1).normal(size=(200, 96)).astype(np.float32)}]
    expected, found = eager_answers(model, module, feeds), answers(graph, feeds)
    assert cosine(expected, found) >= 0.99 and agreement(expected, found) >= 0.95


def test_b120_every_weight_product_is_quantized_and_counted_fused_or_not(
    exported: onnx.ModelProto, cls_int8: Path
) -> None:
    # 2 layers x 6 Linears and the head; packing makes one of three. The tables of tokens and positions come on top.
    plain, fused = ir.from_proto(exported), ir.from_proto(exported)
    assert passed(plain, [DynamicInt8(embeddings=False)]) == {"dynamic_int8": (13, 13)}
    passed(fused, _OPTIMIZE)
    assert passed(fused, [DynamicInt8(embeddings=False)]) == {"dynamic_int8": (9, 9)}
    quantized = read_manifest(cls_int8)["quantized"]
    assert {key: quantized[key] for key in ("done", "of", "left")} == {"done": 11, "of": 11, "left": []}
    assert quantized["multiply_adds"] == {"int8": 1.0} and len(quantized["stored"]) == 11
    assert "- quantized: 11 of 11\n" in (cls_int8 / "REPORT.md").read_text(encoding="utf-8")


_NO_PRODUCT = """
import torch
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return torch.tanh(x)
"""


def test_b120_nothing_to_quantize_is_an_error_and_leaves_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(_NO_PRODUCT, encoding="utf-8")
    options = BuildOptions(
        source=f"{tmp_path / 'plain.py'}:Net", inputs=("x:float32[rows,4]",), quantize="dynamic_int8",
        output=tmp_path / "a",
    )  # fmt: skip
    with pytest.raises(PassError, match=r"dynamic_int8.* changed nothing"):
        build(options)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != "") == ["plain.py"]
    assert not (tmp_path / "a").exists()


def test_b121_graphs_with_contrib_operators_are_quantized_and_load(exported: onnx.ModelProto) -> None:
    for passes in ((), _OPTIMIZE[:1], _OPTIMIZE):
        graph = ir.from_proto(exported)
        passed(graph, passes)
        assert any(node.domain == "com.microsoft" for node in graph.graph)
        done, of = passed(graph, [DynamicInt8()])["dynamic_int8"]
        assert done == of > 0
        assert np.isfinite(answers(graph, [drawn(2, 16, 1)])).all()


def test_b122_optimizing_before_or_after_quantizing_keeps_the_bound_and_before_is_the_default(
    classifier: EagerModel, exported: onnx.ModelProto, cls_int8: Path
) -> None:
    feeds = [drawn(50, 16, seed) for seed in range(4)]
    expected = eager_answers(classifier, classifier.module, feeds)
    packed, found = {}, {}
    for order, passes in {"before": (*_OPTIMIZE, DynamicInt8()), "after": (DynamicInt8(), *_OPTIMIZE)}.items():
        graph = ir.from_proto(exported)
        packed[order] = passed(graph, passes)["pack_qkv"][0]
        found[order] = answers(graph, feeds)
        assert cosine(expected, found[order]) >= 0.99 and agreement(expected, found[order]) >= 0.95
    assert packed == {"before": 2, "after": 0}
    pipeline = read_manifest(cls_int8)["pipeline"]
    assert pipeline.index("pack_qkv") < pipeline.index("dynamic_int8")


def test_b127_a_row_of_zeros_has_a_scale_and_gives_exactly_its_bias(
    classifier: EagerModel, exported: onnx.ModelProto
) -> None:
    def change(name: str, parameter: torch.Tensor) -> None:
        if name == "head.weight":
            parameter[1] = 0
        if name == "encoder.layers.0.feed_forward.up.weight":
            parameter[:32, :32] = 0

    module = changed(classifier, change)
    for per_channel in (True, False):
        graph = graph_of(exported, module)
        passed(graph, (*_OPTIMIZE, DynamicInt8(per_channel=per_channel)))
        scales = [value.const_value for name, value in graph.graph.initializers.items() if name.endswith(".scale")]
        assert all(scale is not None and (scale.numpy() > 0).all() for scale in scales)
        found = answers(graph, [drawn(4, 16, 1)])
        assert (found[:, 1] == module.state_dict()["head.bias"][1].item()).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_b129_a_weight_that_is_not_finite_stops_the_build_with_its_name_and_number(
    cls_weights: Path, tmp_path: Path, value: float
) -> None:
    weights = load_file(cls_weights)
    name = "encoder.layers.1.feed_forward.up.weight"
    weights[name][3, 4] = weights[name][5, 6] = value
    file = tmp_path / "bad.safetensors"
    save_file(weights, file, {"config": json.dumps(dataclasses.asdict(CLS))})
    for quantize in ("none", "dynamic_int8"):
        options = BuildOptions(source="classifier", weights=str(file), quantize=quantize, output=tmp_path / "a")
        with pytest.raises(LoadError, match=rf"bad\.safetensors: {name} holds 2 of 18432 values that are NaN or inf"):
            build(options)
    assert not (tmp_path / "a").exists()


def test_b129_a_checkpoint_and_a_module_of_a_user_are_stopped_the_same_way(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "hf")
    weights = load_file(folder / "model.safetensors")
    name = "bert.encoder.layer.0.output.dense.bias"
    weights[name][7] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=f"{name} holds 1 of 96 values that are NaN or infinite"):
        load(str(folder))
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\nnet = nn.Linear(4, 2)\nnn.init.constant_(net.bias, float('nan'))\n"
    )
    with pytest.raises(LoadError, match=r"mine\.py:net: bias holds 2 of 2 values that are NaN or infinite"):
        load(f"{tmp_path / 'mine.py'}:net", inputs=["x:float32[rows,4]"])
