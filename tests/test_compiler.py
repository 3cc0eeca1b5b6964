"""build and compare: every fault planted in a graph is caught, and what can't be built leaves nothing behind."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tx_export import compiler, runtime
from tx_export.artifact import seal
from tx_export.compiler import BuildOptions, build, compare
from tx_export.errors import ArtifactError, BudgetError, LoadError, PassError, PluginError, TxExportError
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.runtime import UsageError
from tx_export.spec import EagerModel
from tx_export.testing import tiny_bert_folder

_PASS = '''"""A pass of a user's."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tx_export._graph import add_initializer, add_node, array_of
from tx_export.passes import Coverage, GraphPass, Outcome

__all__ = ["Planted"]


@dataclass(frozen=True)
class Planted(GraphPass):
    def call(self, model):
        graph = model.graph
        attention = [node for node in graph if node.op_type == "MultiHeadAttention"]
{body}
        return Outcome(model, True, Coverage(1, 1))
'''

_FAULTS = {
    "wrong_scale": """
        attention[0].attributes["scale"] = ir.AttrFloat32("scale", 1.0)
""",
    "swapped_head": """
        value = attention[0].inputs[2].producer().inputs[0].producer().inputs[1]
        weight = value.const_value.numpy().copy()
        weight[:, [0, 1, 2, 3, 4, 5, 6, 7]] = weight[:, [4, 5, 6, 7, 0, 1, 2, 3]]
        value.const_value = ir.tensor(weight)
""",
    "nan_weight": """
        value = attention[1].inputs[0].producer().inputs[1]
        bias = value.const_value.numpy().copy()
        bias[3] = np.nan
        value.const_value = ir.tensor(bias)
""",
    "shifted_mask": """
        mask = attention[0].inputs[4]
        one = add_initializer(graph, "one", np.ones((1, 1), np.int32))
        parts = [add_initializer(graph, name, np.array([number])) for name, number in (("a", 0), ("b", -1), ("c", 1))]
        (head,) = add_node(attention[0], "Slice", [mask, parts[0], parts[1], parts[2]])
        (first,) = add_node(attention[0], "Slice", [mask, parts[0], parts[2], parts[2]])
        (shifted,) = add_node(attention[0], "Concat", [first, head], {"axis": ir.AttrInt64("axis", 1)})
        for node in attention:
            node.replace_input_with(4, shifted)
""",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert_folder(tmp_path_factory.mktemp("checkpoint") / "tiny", pooling=("mean", "normalize"))


@pytest.fixture(scope="module")
def exported(checkpoint: Path) -> ir.Model:
    return export(load(str(checkpoint)), Target.parse(None, "fused"))


@pytest.fixture
def quick(exported: ir.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of the checkpoint take one export between them."""

    def again(model: EagerModel, target: Target) -> ir.Model:
        return ir.from_proto(ir.to_proto(exported))

    monkeypatch.setattr(compiler, "export", again)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("fault", "module"),
    [
        ("wrong_scale", r"encoder\.layers\.0\.attention \(MultiHeadAttention\), in its own forward behind .*: off by"),
        ("swapped_head", r"encoder\.layers\.0\.attention\.value \(Linear\): off by"),
        ("nan_weight", r"encoder\.layers\.1\.attention\.query \(Linear\): \d+ values are not finite there"),
        ("shifted_mask", r"encoder\.layers\.0\.attention \(MultiHeadAttention\), in its own forward behind"),
    ],
)
def test_a_pass_that_plants_a_fault_is_named_with_output_case_position_and_module(
    checkpoint: Path, tmp_path: Path, fault: str, module: str
) -> None:
    (tmp_path / f"{fault}.py").write_text(_PASS.format(body=_FAULTS[fault].rstrip("\n")), encoding="utf-8")
    passes = f"fold_constants {tmp_path}/{fault}.py:Planted fuse_gelu"
    place = r"in case \d+x\d+ \w+ mask at \[\d"
    message = rf"^{fault}: output 'embedding' .* {place}.*; the first module that differs is {module}"
    with pytest.raises(BudgetError, match=message) as caught:
        build(BuildOptions(source=str(checkpoint), passes=passes, output=tmp_path / "out"))
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("quick")
def test_a_pass_whose_graph_does_not_load_is_named_without_a_temporary_path_or_logs(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = '        attention[0].op_type = "NoSuchOperator"'
    (tmp_path / "broken.py").write_text(_PASS.format(body=body), encoding="utf-8")
    message = r"^broken: model\.onnx: onnxruntime [0-9.]+ can't load it with provider cpu: .*NoSuchOperator"
    with pytest.raises(ArtifactError, match=message) as caught:
        build(BuildOptions(source=str(checkpoint), passes=f"{tmp_path}/broken.py:Planted", output=tmp_path / "out"))
    assert tempfile.gettempdir() not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("quick")
def test_a_pass_whose_graph_fails_when_it_runs_is_named_and_nothing_is_logged(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
        shape = add_initializer(graph, "flat", np.array([1, -1, 16]))
        (flat,) = add_node(attention[1], "Reshape", [attention[1].inputs[2], shape])
        attention[1].replace_input_with(2, flat)
"""
    (tmp_path / "failing.py").write_text(_PASS.format(body=body), encoding="utf-8")
    message = r"^failing: fails in case .*; the first module that is not computed is encoder\.layers\.1\.attention"
    with pytest.raises(BudgetError, match=message):
        build(BuildOptions(source=str(checkpoint), passes=f"{tmp_path}/failing.py:Planted", output=tmp_path / "out"))
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("quick")
def test_a_budget_that_cannot_be_met_names_the_pass_and_leaves_no_artifact(checkpoint: Path, tmp_path: Path) -> None:
    # Query, key and value are one product there, inside one operator with the attention.
    blamed = r"the first module that differs is encoder\.layers\.0\.attention \(MultiHeadAttention\): sqnr_db .* there"
    with pytest.raises(
        BudgetError, match=rf"dynamic_int8: output 'embedding': sqnr_db .* is less than 90, .*; {blamed}"
    ):
        build(BuildOptions(source=str(checkpoint), budget="sqnr_db=90", output=tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_the_same_build_gives_the_same_bytes_and_no_path_of_this_machine(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        build(BuildOptions(source=str(checkpoint), output=tmp_path / name))
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
        assert str(tmp_path).encode() not in path.read_bytes()


@pytest.mark.usefixtures("quick")
def test_the_manifest_counts_fused_attention_and_quantized_weights(checkpoint: Path, tmp_path: Path) -> None:
    folder = build(BuildOptions(source=str(checkpoint), output=tmp_path / "out"))
    manifest = runtime.read_manifest(folder)
    assert manifest["fused"] == {"done": 2, "of": 2, "left": []}
    assert manifest["heads_per_layer"] == [4, 4]
    counted = manifest["quantized"]
    # Two layers of four products (packed q, k, v), and tables of words, positions and token types.
    assert counted["of"] == 11 == counted["done"] + len(counted["left"])
    assert all("nothing to gain" in left["reason"] for left in counted["left"])
    assert manifest["domains"]["com.microsoft"]["nodes"] > 0
    assert manifest["verification"]["overall"]["kind"] == "drift"
    assert runtime.self_test(runtime.Model(folder))["agrees"]


@pytest.mark.usefixtures("quick")
def test_fp32_is_within_the_fidelity_bound_and_compare_passes(checkpoint: Path, tmp_path: Path) -> None:
    folder = build(BuildOptions(source=str(checkpoint), quantize="none", output=tmp_path / "out"))
    found = compare(folder, str(checkpoint))
    assert found["verdict"] == "pass"
    assert set(found) == {"verdict", "outputs", "invariance", "cases"}
    assert found["outputs"]["embedding"]["non_finite"] == 0
    assert found["outputs"]["embedding"]["max_abs"] <= 1e-4  # the fp32 bound: outputs of unit length
    assert {case["mask"] for case in found["cases"]} == {"full", "ragged", "left", "holed", "empty"}


@pytest.mark.usefixtures("quick")
def test_compare_of_a_changed_graph_fails_and_says_where(checkpoint: Path, tmp_path: Path) -> None:
    folder = build(BuildOptions(source=str(checkpoint), quantize="none", output=tmp_path / "out"))
    graph = ir.load(folder / "model.onnx")
    name = "encoder.layers.1.feed_forward.down.bias"
    weight = graph.graph.initializers[name].const_value
    assert weight is not None
    bias = weight.numpy() + np.eye(1, 16, dtype=np.float32)[0] / 2
    graph.graph.initializers[name].const_value = ir.tensor(bias, name=name)
    ir.save(graph, folder / "model.onnx")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]
    seal(folder, manifest)
    found = compare(folder, str(checkpoint))
    assert found["verdict"] == "fail"
    assert found["reason"].startswith("the graph is not what its own recipe makes; artifact: output 'embedding'")
    assert (
        "; the first module that differs is encoder.layers.1.feed_forward.down (Linear): off by 0.5" in found["reason"]
    )


@pytest.mark.usefixtures("quick")
def test_compare_refuses_a_source_with_other_weights(checkpoint: Path, tmp_path: Path) -> None:
    folder = build(BuildOptions(source=str(checkpoint), quantize="none", output=tmp_path / "out"))
    other = tiny_bert_folder(tmp_path / "other", pooling=("mean", "normalize"), seed=1)
    with pytest.raises(
        UsageError, match=r"other weights than the artifact was made from: checkpoint \w+, not checkpoint"
    ):
        compare(folder, str(other))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"passes": "fuse_gelu", "quantize": "none"}, PluginError, "--passes replaces the whole pipeline"),
        ({"passes": "fuse_gelo"}, PluginError, "unknown pass 'fuse_gelo'.*did you mean fuse_gelu"),
        (
            {"quantize": "dynamic_int8{bits=4}"},
            PluginError,
            "pass dynamic_int8: unknown option 'bits=4'; known: per_channel",
        ),
        ({"provider": "tpu"}, PluginError, "unknown provider 'tpu'; known: cpu, cuda"),
        ({"budget": "sqnr=3"}, PluginError, "budget: expected KEY=NUMBER, not 'sqnr=3'"),
        ({"target_ort": "newest"}, TxExportError, "--target-ort 'newest': expected X.Y"),
        ({"size": "tiny"}, PluginError, "classifier has no size 'tiny'; known: small, medium, large"),
        ({"source": "no/such"}, LoadError, "no such folder"),
        ({"settings": {"num_heads": "3"}}, LoadError, "d_model 128 does not divide by num_heads 3"),
        ({"settings": {"heads": "3"}}, PluginError, "heads"),
        ({"calibrate": Path("absent.txt")}, LoadError, "--calibrate absent.txt: can't be read"),
    ],
)
def test_bad_input_is_refused_before_the_export(
    options: dict[str, object], error: type[TxExportError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        build(BuildOptions(output=tmp_path / "out", **options))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_a_pass_that_was_asked_for_and_changes_nothing_is_an_error(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(PassError, match="pass fuse_gelu changed nothing"):
        build(BuildOptions(source=str(checkpoint), passes="fold_constants fuse_gelu fuse_gelu", output=tmp_path / "o"))


@pytest.mark.usefixtures("quick")
def test_an_existing_target_needs_force_and_keeps_foreign_files(checkpoint: Path, tmp_path: Path) -> None:
    options = BuildOptions(source=str(checkpoint), quantize="none", output=tmp_path / "out")
    folder = build(options)
    (folder / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ArtifactError, match="exists already; --force replaces it"):
        build(options)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    build(BuildOptions(source=str(checkpoint), output=folder, force=True))
    assert (folder / "notes.txt").read_text() == "mine"
    assert runtime.read_manifest(folder)["quantized"]["done"] > 0
