"""Cases of half precision: what its range and its 11 bits can't hold, casts in models, and what CPUs make of it.

References: eager in float32. fp16's bound: the largest difference over the largest eager value is at most 1e-2. Each
graph runs as it is and emulated, as the CPU provider computes neighbouring nodes in float32.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from tx_export._emulation import emulated
from tx_export.artifact import open_graph, seal
from tx_export.compiler import BuildOptions, build, compare
from tx_export.errors import PassError, TxExportError
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.optimize.fold_constants import FoldConstants
from tx_export.optimize.fuse_gelu import FuseGelu
from tx_export.optimize.pack_qkv import PackQkv
from tx_export.passes import Context, Coverage, Outcome
from tx_export.providers.cpu import Cpu
from tx_export.quantize.float16 import Float16
from tx_export.runtime import Model, read_manifest, self_test
from tx_export.spec import EagerModel
from tx_export.verify import default_lines, eager_runner, split_lines, text_feeds

from .conftest import Once
from .models import build_from

Feeds = Mapping[str, np.ndarray]
_BOUND = 1e-2
_MODULES = Path(__file__).with_name("half_modules.py")
_SHAPES = ((1, 5), (3, 17), (2, 64))
_TOKEN = 7


@pytest.fixture(scope="module")
def classifier(cls_weights: Path) -> EagerModel:
    return load("classifier", weights=str(cls_weights))


@pytest.fixture(scope="module")
def exported(classifier: EagerModel) -> onnx.ModelProto:
    """The classifier's graph, without any pass behind the export."""
    return ir.to_proto(export(classifier, Target.parse(None, "fused")))


@pytest.fixture(scope="module")
def calibration(classifier: EagerModel) -> list[dict[str, np.ndarray]]:
    return text_feeds(classifier, split_lines(default_lines()).choosing[::8])


@pytest.fixture(scope="session")
def cls_float16(once: Once, cls_weights: Path) -> Path:
    """The classifier as float16."""
    return once("cls-float16", lambda folder: build_from(cls_weights, folder, "float16"))


def scaled(model: EagerModel, factors: Mapping[str, float]) -> nn.Module:
    """A copy of the module with the parameters of these names multiplied."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        for name, factor in factors.items():
            module.get_parameter(name).mul_(factor)
    return module


def graph_of(exported: onnx.ModelProto, module: nn.Module, epsilon: float | None = None) -> ir.Model:
    """The exported graph with the parameters of another module of that class, which stand there by name."""
    graph = ir.from_proto(exported)
    for name, parameter in module.named_parameters():
        graph.graph.initializers[name].const_value = ir.tensor(parameter.detach().numpy().copy(), name=name)
    for node in graph.graph if epsilon is not None else ():
        if node.op_type == "LayerNormalization":
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", epsilon or 0.0)
    return graph


def opened(graph: ir.Model) -> Callable[[Feeds], dict[str, np.ndarray]]:
    return open_graph(graph, Cpu().session(), threads=1)


def halved(graph: ir.Model, module: nn.Module, feeds: Sequence[Feeds]) -> Coverage:
    """Make it float16 in place."""
    outcome = dataclasses.replace(Float16(), context=Context(module, feeds, opened))(graph)
    assert isinstance(outcome, Outcome) and outcome.modified
    return outcome.coverage


def drawn(*shapes: tuple[int, int]) -> list[Feeds]:
    rng = np.random.default_rng(1)
    ids = [rng.integers(5, 1000, shape) for shape in shapes]
    return [{"input_ids": each, "attention_mask": np.ones_like(each)} for each in ids]


def error(expected: np.ndarray, found: np.ndarray) -> float:
    assert np.isfinite(found).all() and np.isfinite(expected).all()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def errors(graph: ir.Model, model: EagerModel, module: nn.Module, feeds: Sequence[Feeds]) -> list[float]:
    """Of the first output, as the CPU runs the graph and as it rounds by itself."""
    eager, name = eager_runner(model, module), model.outputs[0].name
    runs = [opened(graph), opened(emulated(graph))]
    return [error(eager(each)[name], run(each)[name]) for each in feeds for run in runs]


def kept(coverage: Coverage, words: str) -> list[str]:
    return [left.name for left in coverage.left if words in left.reason]


def test_b004_numbers_that_hide_scores_fit_into_float16(tmp_path: Path) -> None:
    source = f"{_MODULES}:Fills"
    folder = build(BuildOptions(source=source, quantize="float16", output=tmp_path / "fills"))
    graph = ir.load(folder / "model.onnx")
    constants = [value.const_value.numpy() for value in graph.graph.initializers.values() if value.const_value]
    floats = [array for array in constants if array.dtype.kind == "f"]
    assert len(floats) > 4 and all(array.dtype == np.float16 and np.abs(array).max() <= 65504 for array in floats)
    (feeds,) = drawn((3, 17))
    mask = feeds["attention_mask"]
    mask[1, 8:], mask[2] = 0, 0
    model = load(source)
    expected = eager_runner(model)(feeds)["output_0"]
    for run in (Model(folder, threads=1).run_arrays, opened(emulated(graph))):
        found = run(feeds)["output_0"]
        assert np.isfinite(found).all() and error(expected[mask != 0], found[mask != 0]) <= _BOUND


def test_b082_an_epsilon_that_is_0_in_float16_keeps_its_norm_in_float32(
    classifier: EagerModel, exported: onnx.ModelProto, calibration: list[Feeds]
) -> None:
    module = scaled(classifier, {"encoder.positions.table.weight": 0})
    with torch.no_grad():
        module.get_parameter("encoder.embedding.weight")[_TOKEN] = 0.5
    for norm in (each for each in module.modules() if isinstance(each, nn.LayerNorm)):
        norm.eps = 1e-12
    graph = graph_of(exported, module, epsilon=1e-12)
    coverage = halved(graph, module, calibration)
    assert len(kept(coverage, "its epsilon 1e-12 is 0 in float16")) == 4
    ids = np.full((2, 9), _TOKEN)
    assert max(errors(graph, classifier, module, [{"input_ids": ids, "attention_mask": np.ones_like(ids)}])) <= _BOUND


@pytest.mark.parametrize("level", ["off", "all"])
@pytest.mark.parametrize("size", [1e5, 300], ids=["b100", "b101"])
def test_b100_b101_a_residual_out_of_range_or_with_its_squares_out_of_range_stays_in_float32(
    size: float, level: str, classifier: EagerModel, exported: onnx.ModelProto, calibration: list[Feeds]
) -> None:
    down = "encoder.layers.0.feed_forward.down"
    module = scaled(classifier, {f"{down}.weight": size, f"{down}.bias": size})
    graph = graph_of(exported, module)
    for item in (FoldConstants(), FuseGelu(), PackQkv()) if level == "all" else ():
        item(graph)
    coverage = halved(graph, module, calibration)
    reasons = [left.reason for left in coverage.left]
    assert any("reaches" in reason for reason in reasons) and coverage.done > len(coverage.left)
    norms = [node for node in graph.graph if node.op_type == "LayerNormalization"]
    assert [node.outputs[0].dtype == ir.DataType.FLOAT for node in norms] == [False, True, False, False]
    assert max(errors(graph, classifier, module, drawn(*_SHAPES))) <= _BOUND
    plain = open_graph(graph, Cpu().session() | {"graph_optimization": level}, threads=1)
    eager = eager_runner(classifier, module)
    assert max(error(eager(each)["logits"], plain(each)["logits"]) for each in drawn(*_SHAPES)) <= _BOUND


def test_b101_the_squares_of_a_norm_by_hand_stay_in_float32() -> None:
    model = load(f"{_MODULES}:RootMeanSquare")
    graph = export(model, Target.parse(None, "fused"))
    FoldConstants()(graph)
    coverage = halved(graph, model.module, [])
    assert kept(coverage, "Pow needs more bits") and kept(coverage, "(up to 1e-06) loses 1%")
    feeds = [{"input_ids": each["input_ids"]} for each in drawn(*_SHAPES)]
    assert max(errors(graph, model, model.module, feeds)) <= _BOUND


def test_b102_casts_in_a_model_follow_the_type_of_what_they_make(tmp_path: Path) -> None:
    source = f"{_MODULES}:Casts"
    folder = build(BuildOptions(source=source, quantize="float16", ops="standard", output=tmp_path / "casts"))
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    graph = ir.load(folder / "model.onnx")
    model = load(source)
    assert max(errors(graph, model, model.module, drawn(*_SHAPES))) <= _BOUND
    left = {each["name"] for each in read_manifest(folder)["quantized"]["left"]}
    assert {"cos", "sin"} <= left


def test_b104_manifest_and_report_tell_the_casts_of_cpus_and_that_it_is_slower(cls_float16: Path) -> None:
    manifest = read_manifest(cls_float16)
    (reason,) = [each["reason"] for each in manifest["quantized"]["left"] if each["name"] == "speed on CPUs"]
    assert int(reason.split()[0]) > 10 and "slower than fp32" in reason
    report = (cls_float16 / "REPORT.md").read_text(encoding="utf-8")
    assert reason in report and "faster" not in report + json.dumps(manifest)


def test_b105_bfloat16_is_refused_for_the_cpu(hf_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(PassError, match=r"^bfloat16: .*CPU provider has no bfloat16 arithmetic.*--provider cuda"):
        build_from(hf_checkpoint, tmp_path / "bf16", "bfloat16")
    assert list(tmp_path.iterdir()) == []


def test_b109_attention_with_scores_above_the_range_stays_in_float32_and_all_before_it(
    classifier: EagerModel, exported: onnx.ModelProto, calibration: list[Feeds]
) -> None:
    factors = {
        f"encoder.layers.1.attention.{part}.{kind}": 165.0 for part in ("query", "key") for kind in ("weight", "bias")
    }
    module = scaled(classifier, factors)
    graph = graph_of(exported, module)
    for item in (FoldConstants(), FuseGelu(), PackQkv()):
        item(graph)
    coverage = halved(graph, module, calibration)
    assert len(kept(coverage, "its scores are of the size 2.8e+04")) > 10  # and all before it
    assert max(errors(graph, classifier, module, drawn(*_SHAPES))) <= _BOUND


@pytest.mark.parametrize("level", ["off", "basic", "extended", "all"])
def test_b091_no_level_of_optimization_changes_the_answer_of_float16(
    cls_float16: Path, classifier: EagerModel, tmp_path: Path, level: str
) -> None:
    folder = Path(shutil.copytree(cls_float16, tmp_path / level))
    manifest = read_manifest(folder)
    seal(folder, manifest | {"session": {"cpu": manifest["session"]["cpu"] | {"graph_optimization": level}}})
    run, eager = Model(folder, threads=1).run_arrays, eager_runner(classifier)
    assert max(error(eager(each)["logits"], run(each)["logits"]) for each in drawn(*_SHAPES)) <= _BOUND


def test_a_build_of_bfloat16_for_cuda_is_judged_by_emulation_on_the_cpu(hf_checkpoint: Path, tmp_path: Path) -> None:
    """The budget is that of the pass; the graph itself can't be loaded here."""
    folder = build_from(hf_checkpoint, tmp_path / "bf16", "bfloat16", provider="cuda")
    manifest = read_manifest(folder)
    assert manifest["verified_on"]["provider"] == "cpu" and list(manifest["session"]) == ["cuda"]
    record = manifest["verification"]["passes"][-1]
    assert (record["pass"], record["kind"], record["budget"]) == ("bfloat16", "drift", "sqnr_db=22")
    assert record["outputs"]["logits"]["sqnr_db"] >= 22
    assert any(left["name"] == "verification" for left in manifest["quantized"]["left"])
    weights = [value.dtype for value in ir.load(folder / "model.onnx").graph.initializers.values()]
    assert ir.DataType.BFLOAT16 in weights and ir.DataType.FLOAT not in weights


def test_inputs_and_outputs_can_be_half_as_manifest_runtime_self_test_and_compare_have_them(tmp_path: Path) -> None:
    source = f"{_MODULES}:Features"
    folder = build(BuildOptions(source=source, quantize="float16{keep_io=false}", output=tmp_path / "features"))
    manifest, graph = read_manifest(folder), ir.load(folder / "model.onnx").graph
    ends = {value.name: value.dtype for value in (*graph.inputs, *graph.outputs)}
    assert ends == {"x": ir.DataType.FLOAT16, "output_0": ir.DataType.FLOAT16}
    assert [(item["name"], item["dtype"]) for key in ("inputs", "outputs") for item in manifest[key]] == [
        ("x", "float16"),
        ("output_0", "float16"),
    ]
    x = np.random.default_rng(1).normal(size=(3, 17, 96)).astype(np.float32)
    model, opened_here = load(source), Model(folder, threads=1)
    expected = eager_runner(model)({"x": x})["output_0"]
    found = opened_here.run_arrays({"x": x})["output_0"]  # rounded to half on the way in
    assert found.dtype == np.float16 and error(expected, found) <= _BOUND
    assert np.array_equal(opened_here.run_arrays({"x": x.astype(np.float16)})["output_0"], found)
    with pytest.raises(TxExportError, match="input 'x': float32 values don't fit into float16"):
        opened_here.run_arrays({"x": x * np.float32(1e6)})
    assert self_test(opened_here)["agrees"]
    assert compare(folder, source)["verdict"] == "pass"
