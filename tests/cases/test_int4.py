"""Cases of weights in blocks: widths and block sizes, zero points, shared tables, and what is left out."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn

from tx_export import cli, runtime
from tx_export.artifact import open_graph, write_graph
from tx_export.compiler import BuildOptions, build
from tx_export.errors import LoadError, PassError, TxExportError
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.optimize.fold_constants import FoldConstants
from tx_export.passes import Context, Coverage, Outcome, Pipeline
from tx_export.providers.cpu import Cpu
from tx_export.quantize.blockwise import Blockwise
from tx_export.quantize.dynamic_int8 import DynamicInt8
from tx_export.runtime import read_manifest
from tx_export.spec import EagerModel
from tx_export.testing import eager_model
from tx_export.verify import eager_runner

from .conftest import Once
from .models import CLS, save_hf

Array = NDArray[Any]
Feeds = dict[str, Array]
Case = tuple[EagerModel, onnx.ModelProto]  # the reference, and its graph without any pass behind the export
_FORMS = [True, False]


@pytest.fixture(scope="module")
def classifier(cls_weights: Path) -> Case:
    model = load("classifier", weights=str(cls_weights))
    return model, _exported(model)


@pytest.fixture(scope="session")
def masked_lm_folder(once: Once) -> Path:
    """A BERT whose table of 8000 words is the weight of its last layer too."""
    return once("hf-masked-lm", lambda folder: save_hf(folder, "BertForMaskedLM", vocab_size=8000))


@pytest.fixture(scope="module")
def masked_lm(masked_lm_folder: Path) -> Case:
    model = load(str(masked_lm_folder))
    return model, _exported(model)


def _exported(model: EagerModel) -> onnx.ModelProto:
    return ir.to_proto(export(model, Target.parse(None, "fused")))


def _linear(inputs: int, outputs: int) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Linear(inputs, outputs)
    model = eager_model(module, [f"x:float32[rows,{inputs}]"], [f"y:float32[rows,{outputs}]"])
    return model, _exported(model)


def _quantized(exported: onnx.ModelProto, **options: Any) -> tuple[ir.Model, Coverage]:
    graph = ir.from_proto(exported)
    FoldConstants()(graph)
    outcome = Blockwise(**options)(graph)
    assert isinstance(outcome, Outcome)
    return graph, outcome.coverage


def _run(graph: ir.Model, feeds: Feeds) -> Array:
    """Its one output."""
    (found,) = open_graph(graph, Cpu().session(), threads=1)(feeds).values()
    return found


def _size(graph: ir.Model, folder: Path) -> int:
    write_graph(graph, folder / "model.onnx")
    return (folder / "model.onnx").stat().st_size


def _arrays(graph: ir.Model) -> dict[str, Array]:
    return {name: item.const_value.numpy() for name, item in graph.graph.initializers.items() if item.const_value}


def _halves(stored: Array) -> Array:
    """4-bit numbers of bytes, the low half first, along the last axis."""
    return np.stack([stored % 16, stored // 16], axis=-1).reshape(*stored.shape[:-1], -1)


def _stored_weights(graph: ir.Model) -> dict[str, Array]:
    """Each 4-bit weight as it is stored, (q - zero) scale, by the name that it had, with what fills up its blocks."""
    arrays, found = _arrays(graph), {}
    for key in (key.removesuffix(".int4") for key in arrays if key.endswith(".int4")):
        q, scale = _halves(arrays[f"{key}.int4"]).astype(np.float64), arrays[f"{key}.scale"]
        zero = _halves(arrays[f"{key}.zero"])[:, : scale.shape[1]] if f"{key}.zero" in arrays else np.full(1, 8)
        found[key] = ((q - zero[..., None]) * scale[..., None]).reshape(len(q), -1)
    return found


def _eager_with(model: EagerModel, weights: dict[str, Array], feeds: Feeds) -> Array:
    """Eager's answer with the stored weights in place of its own."""
    module = copy.deepcopy(model.module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(torch.from_numpy(weight[:, : parameters[name].shape[1]]))
    (found,) = eager_runner(model, module)(feeds).values()
    return found


def _tokens(batch: int, tokens: int, seed: int) -> Feeds:
    ids = np.random.default_rng(seed).integers(5, 1000, (batch, tokens))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def _changed(case: Case, change: Callable[[str, torch.Tensor], None]) -> tuple[nn.Module, onnx.ModelProto]:
    """A copy of module and graph with parameters changed in place."""
    module, graph = copy.deepcopy(case[0].module), ir.from_proto(case[1])
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            change(name, parameter)
            graph.graph.initializers[name].const_value = ir.tensor(parameter.detach().numpy().copy(), name=name)
    return module, ir.to_proto(graph)


def _sqnr(expected: Array, found: Array) -> float:
    return float(10 * np.log10((expected**2).sum() / ((expected - found) ** 2).sum()))


@pytest.mark.parametrize("inputs", [100, 33])
def test_b135_a_width_that_32_does_not_divide_is_within_a_step_and_computed_as_stored(inputs: int) -> None:
    model, exported = _linear(inputs, 96)
    weight, bias = (value.detach().numpy() for value in model.module.parameters())
    feeds = {"x": np.random.default_rng(1).normal(size=(50, inputs)).astype(np.float32)}
    for symmetric in _FORMS:
        graph, coverage = _quantized(exported, symmetric=symmetric, accuracy_level=0)
        assert (coverage.done, coverage.of) == (1, 1)
        stored = _stored_weights(graph)["weight"][:, :inputs]
        step = np.abs(np.repeat(_arrays(graph)["weight.scale"], 32, axis=1)[:, :inputs])
        assert (np.abs(stored - weight) <= step * (1 + 1e-5)).all()
        assert np.abs(_run(graph, feeds) - (feeds["x"] @ stored.T + bias)).max() <= 1e-3
        # Activations in 8 bits: normal numbers of which 127 steps reach to the largest of 32 have 40 dB and more.
        graph, _ = _quantized(exported, symmetric=symmetric)
        assert _sqnr(feeds["x"] @ stored.T + bias, _run(graph, feeds)) >= 35


def test_b136_no_block_size_returns_zeros() -> None:
    model, exported = _linear(1024, 64)
    bias = dict(model.module.named_parameters())["bias"].detach().numpy()
    feeds = {"x": np.random.default_rng(1).normal(size=(20, 1024)).astype(np.float32)}
    for block_size in (16, 32, 64, 128, 256):
        graph, _ = _quantized(exported, block_size=block_size, accuracy_level=0)
        expected = feeds["x"] @ _stored_weights(graph)["weight"].T + bias
        assert np.abs(_run(graph, feeds) - expected).max() <= 1e-3 < np.abs(expected).min(axis=0).max()


def test_b136_a_block_size_of_512_is_refused_with_the_list_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["build", "--quantize", "blockwise{block_size=512}", "-o", str(tmp_path / "a")])
    assert ended.value.code == 2
    message = "error: pass blockwise: block_size is 512; allowed: 16, 32, 64, 128, 256"
    assert capsys.readouterr().err.splitlines()[-1] == message
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("symmetric", _FORMS)
def test_b138_both_forms_compute_what_eager_does_with_the_stored_weights(symmetric: bool, classifier: Case) -> None:
    model, exported = classifier
    feeds = _tokens(50, 8, 1)
    graph, coverage = _quantized(exported, symmetric=symmetric, accuracy_level=0)
    assert coverage.done == coverage.of == 15  # 2 layers x 6 Linears, the head, the tables of tokens and positions
    stored = _stored_weights(graph)
    assert len(stored) == 15
    expected, found = _eager_with(model, stored, feeds), _run(graph, feeds)
    assert np.abs(found - expected).max() <= 1e-3 * np.ptp(expected)
    # And it is the model that was meant: 4-bit weights lie within the pass's budget of it.
    assert _sqnr(_eager_with(model, {}, feeds), found) >= 5


def test_b138_activations_in_8_bits_cost_less_than_weights_in_4(classifier: Case) -> None:
    model, exported = classifier
    feeds = _tokens(50, 8, 1)
    graph, _ = _quantized(exported)
    stored = _eager_with(model, _stored_weights(graph), feeds)
    assert _sqnr(stored, _run(graph, feeds)) > _sqnr(_eager_with(model, {}, feeds), stored)


def test_b141_the_head_and_the_tables_are_left_out_as_asked_and_the_sizes_follow(
    masked_lm: Case, tmp_path: Path
) -> None:
    sizes, tells = {}, {}
    kinds: dict[str, dict[str, Any]] = {
        "default": {"embeddings": False},
        "excluded": {"exclude": "head.decoder"},
        "included": {},
    }
    for kind, options in kinds.items():
        graph, coverage = _quantized(masked_lm[1], **options)
        sizes[kind], tells[kind] = _size(graph, tmp_path), {left.name: left.reason for left in coverage.left}
    assert min(sizes["default"], sizes["excluded"]) > sizes["included"]
    assert tells["included"] == {}
    assert tells["excluded"] == {"head.decoder.weight": "excluded, 3072000 bytes"}
    twice = "embeddings=false: its 3072000 bytes stand beside the blocks of its product"
    assert tells["default"] == {"head.decoder.weight": twice}
    with pytest.raises(PassError, match=r"no weight or module is named 'lm_head'; nearest weights: .*head\.decoder"):
        Blockwise(exclude="lm_head").call(ir.from_proto(masked_lm[1]))


def test_b141_what_was_excluded_stands_in_manifest_and_report(masked_lm_folder: Path, tmp_path: Path) -> None:
    folder = build(
        BuildOptions(source=str(masked_lm_folder), quantize="blockwise{exclude=head.decoder}", output=tmp_path / "a")
    )
    quantized = read_manifest(folder)["quantized"]
    left = {"name": "head.decoder.weight", "reason": "excluded, 3072000 bytes"}
    assert quantized["left"] == [left] * 2 and quantized["of"] == quantized["done"] + 2  # looked up, and multiplied
    # 96 x 192: 3 blocks of 16 bytes for each output, their scales, and 2 bytes with their zero points.
    up = {"name": "encoder.layers.0.feed_forward.up.weight", "before": 73728, "after": 192 * 62, "form": "int4"}
    assert up in quantized["stored"] and len(quantized["stored"]) == quantized["done"] + 1
    whole = {"name": "head.decoder.weight", "before": 3072000, "after": 3072000, "form": "float32"}
    assert whole | {"reason": left["reason"]} in quantized["stored"]
    # Of 2 layers with 3 x 96 x 96, 96 x 96 and 2 x 96 x 192, a head with 96 x 96 and the decoder with 96 x 8000.
    in_blocks, in_float = 2 * (4 * 96 * 96 + 2 * 96 * 192) + 96 * 96, 96 * 8000
    shares = {"float32": in_float / (in_blocks + in_float), "int4": in_blocks / (in_blocks + in_float)}
    assert quantized["multiply_adds"] == {name: round(share, 6) for name, share in shares.items()}
    report = (folder / "REPORT.md").read_text(encoding="utf-8")
    assert "left: head.decoder.weight (excluded, 3072000 bytes)" in report
    # Both layers stand in one row.
    assert "| encoder.layers.*.feed_forward.up.weight | 2 | int4 | 147,456 | 23,808 |  |" in report
    assert "| head.decoder.weight | 1 | float32 | 3,072,000 | 3,072,000 | excluded, 3072000 bytes |" in report


def test_b117_a_table_that_is_a_head_too_is_stored_once_in_4_bits(masked_lm: Case, tmp_path: Path) -> None:
    model, exported = masked_lm
    feeds = _tokens(4, 16, 1)
    feeds["token_type_ids"] = np.zeros_like(feeds["input_ids"])
    for symmetric in _FORMS:
        graph, coverage = _quantized(exported, symmetric=symmetric, accuracy_level=0)
        assert coverage.done == coverage.of
        large = [name for name, array in _arrays(graph).items() if array.nbytes >= 8000 * 96 // 2]
        assert large == ["head.decoder.weight.int4"]
        assert _size(graph, tmp_path) <= 0.2 * _size(ir.from_proto(exported), tmp_path)
        expected = _eager_with(model, _stored_weights(graph), feeds)
        assert np.abs(_run(graph, feeds) - expected).max() <= 1e-3 * np.ptp(expected)


@pytest.mark.filterwarnings("error:.*divide")
def test_b127_a_row_of_zeros_has_a_scale_and_gives_exactly_its_bias(classifier: Case) -> None:
    def change(name: str, parameter: torch.Tensor) -> None:
        if name == "head.weight":
            parameter[1] = 0
        if name == "encoder.layers.0.feed_forward.up.weight":
            parameter[:32, :32] = 0

    module, exported = _changed(classifier, change)
    for symmetric in _FORMS:
        graph, _ = _quantized(exported, symmetric=symmetric)
        scales = [array for name, array in _arrays(graph).items() if name.endswith(".scale")]
        assert len(scales) == 15 and all(np.isfinite(array).all() and (array != 0).all() for array in scales)
        found = _run(graph, _tokens(4, 16, 1))
        assert (found[:, 1] == module.state_dict()["head.bias"][1].item()).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_b129_a_weight_that_is_not_finite_stops_an_int4_build_with_its_name_and_number(
    cls_weights: Path, tmp_path: Path, value: float
) -> None:
    weights = load_file(cls_weights)
    name = "encoder.layers.1.feed_forward.up.weight"
    weights[name][3, 4] = value
    file = tmp_path / "bad.safetensors"
    save_file(weights, file, {"config": json.dumps(dataclasses.asdict(CLS))})
    options = BuildOptions(source="classifier", weights=str(file), quantize="blockwise", output=tmp_path / "a")
    with pytest.raises(LoadError, match=rf"bad\.safetensors: {name} holds 1 of 18432 values that are NaN or inf"):
        build(options)
    assert not (tmp_path / "a").exists()


def test_b129_a_pass_that_meets_such_a_weight_names_it_too(classifier: Case) -> None:
    def change(name: str, parameter: torch.Tensor) -> None:
        if name == "head.weight":
            parameter[0, :2] = float("nan")

    _, exported = _changed(classifier, change)
    with pytest.raises(PassError, match=r"head\.weight: 2 of 288 weights are NaN or infinite"):
        Blockwise().call(ir.from_proto(exported))


def test_b121_int8_asked_for_on_a_graph_that_is_int4_already_is_a_clear_error(classifier: Case) -> None:
    model, exported = classifier
    context = Context(model.module, (), lambda graph: lambda feeds: {})
    pipeline = Pipeline((Blockwise(), DynamicInt8()))
    message = r"^pass dynamic_int8 changed nothing \(MatMulNBits: 13 products have quantized weights already\)$"
    with pytest.raises(PassError, match=message):
        pipeline.run_graph(ir.from_proto(exported), context, {"blockwise", "dynamic_int8"}, lambda item, outcome: None)


def test_b121_int8_takes_what_int4_was_not_asked_for_and_both_are_counted(cls_weights: Path, tmp_path: Path) -> None:
    passes = "fold_constants pack_qkv dynamic_int8{only=encoder.layers} blockwise{only=head, bits=8}"
    folder = build(BuildOptions(source="classifier", weights=str(cls_weights), passes=passes, output=tmp_path / "a"))
    quantized = read_manifest(folder)["quantized"]
    # 2 layers of 4 products, and the head; the tables are nobody's.
    assert (quantized["done"], quantized["of"], quantized["left"]) == (9, 9, [])
    forms = {item["name"]: item["form"] for item in quantized["stored"]}
    assert forms["head.weight"] == "int8" and forms["encoder.layers.1.attention.qkv.weight"] == "int8"
    assert forms["encoder.embedding.weight"] == "float32" and len(forms) == 11
    assert quantized["multiply_adds"] == {"int8": 1.0}
    operators = [node.op_type for node in ir.load(folder / "model.onnx").graph]
    assert (operators.count("QAttention"), operators.count("MatMulNBits")) == (2, 1)


def test_b138_the_runtime_that_fails_is_named_with_its_version(
    cls_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a"
    build(BuildOptions(source="classifier", weights=str(cls_weights), quantize="blockwise", output=folder))
    assert read_manifest(folder)["min_onnxruntime"] == "1.23.0"  # GatherBlockQuantized with zero points
    # A stand-in for a release that gives nonsense.
    monkeypatch.setattr(
        runtime.Model, "run_arrays", lambda self, feeds: {"logits": np.zeros((len(feeds["input_ids"]), 3))}
    )
    assert runtime.main(["--self-test"], folder) == 1
    assert f"DIFFERS with onnxruntime {onnxruntime.__version__}\n" in capsys.readouterr().out
    # And one that has no such operator.
    monkeypatch.setattr(onnxruntime, "__version__", "1.16.3")
    with pytest.raises(TxExportError, match=r"^onnxruntime is too old: needs >= 1\.23\.0, found 1\.16\.3$"):
        runtime.Model(folder)
