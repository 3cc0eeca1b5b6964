"""Opset, IR and exporter version."""

from __future__ import annotations

import dataclasses
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from tx_export import cli, compiler
from tx_export.compiler import BuildOptions, build
from tx_export.errors import ExportError
from tx_export.export import Target, export, least_onnxruntime
from tx_export.load import load
from tx_export.metrics import fidelity_bound
from tx_export.runtime import Model, read_manifest
from tx_export.spec import EagerModel
from tx_export.testing import graph_from_text, tiny_classifier

from .conftest import Once

_FEEDS = {"input_ids": np.array([[7, 8, 9, 3]]), "attention_mask": np.array([[1, 1, 1, 0]])}


@pytest.fixture(scope="module")
def exported(once: Once, cls_weights: Path) -> Path:
    """The classifier as it comes out of the exporter, with fused operators."""

    def make(folder: Path) -> None:
        folder.mkdir()
        model = load("classifier", weights=str(cls_weights))
        ir.save(export(model, Target.parse(None, "fused")), folder / "model.onnx")

    return once("cls-exported", make) / "model.onnx"


@pytest.fixture
def options(exported: Path, cls_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildOptions:
    """Builds of the classifier take one export between them; fused graphs are the same for every target."""
    monkeypatch.setattr(compiler, "export", lambda model, target: ir.load(exported))
    return BuildOptions("classifier", weights=str(cls_weights), quantize="none", output=tmp_path / "a")


# Limits of each release, from its compatibility table: IR version, opset.
@pytest.mark.parametrize(
    ("release", "ir_version", "opset"), [("1.14.1", 8, 18), ("1.16.3", 9, 19), ("1.17.1", 9, 20), ("1.20.1", 10, 21)]
)
def test_b070_b071_a_target_runtime_can_read_what_is_built_for_it(
    release: str, ir_version: int, opset: int, options: BuildOptions
) -> None:
    folder = build(dataclasses.replace(options, target_ort=release))
    written, manifest = onnx.load(folder / "model.onnx"), read_manifest(folder)
    versions = {entry.domain: entry.version for entry in written.opset_import}
    assert written.ir_version == manifest["ir_version"] <= ir_version
    assert versions[""] == manifest["opset"] <= opset
    assert versions == {name.replace("ai.onnx", ""): used["version"] for name, used in manifest["domains"].items()}
    least = tuple(map(int, manifest["min_onnxruntime"].split(".")))
    assert (1, 14, 0) <= least <= tuple(map(int, release.split(".")))


def test_b071_a_model_that_needs_more_than_the_target_is_refused_by_the_operator(options: BuildOptions) -> None:
    """Unpacked attention is an operator of ONNX Runtime 1.15."""
    asked = dataclasses.replace(options, target_ort="1.14.1", quantize=None, passes="fold_constants")
    with pytest.raises(ExportError, match=r"MultiHeadAttention needs ONNX Runtime 1\.15, the target is 1\.14"):
        build(asked)
    assert options.output is not None and not options.output.exists()


@pytest.mark.parametrize("signature", ["with the switch", "without it"])
def test_b072_the_exporter_is_chosen_by_name_whatever_the_default_is(
    signature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for torch.onnx.export; torch itself is pinned, so there are no two releases to compare."""
    given: dict[str, Any] = {}

    def standing(model: Any, arguments: Any, *, dynamo: bool, **others: Any) -> None:
        given.update(others, dynamo=dynamo)
        raise RuntimeError("far enough")

    def old(model: Any, arguments: Any, f: str) -> None:
        raise AssertionError("never called")

    monkeypatch.setattr(torch.onnx, "export", standing if signature == "with the switch" else old)
    with pytest.raises(ExportError, match="far enough" if signature == "with the switch" else "dynamo"):
        export(tiny_classifier(), Target.parse(None, "fused"))
    assert given.get("dynamo", signature == "without it") is True


def test_b072_the_manifest_records_what_exported_it(cls_artifact: Path) -> None:
    versions = read_manifest(cls_artifact)["versions"]
    assert {name: versions[name] for name in ("torch", "onnxscript", "onnx-ir")} == {
        name: metadata.version(name) for name in ("torch", "onnxscript", "onnx-ir")
    }


def test_b073_an_opset_that_was_not_delivered_is_an_error_and_the_manifest_says_what_is_in_the_file(
    exported: Path, options: BuildOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no --opset, the target runtime decides; a stand-in for the exporter stays at another opset."""

    def staying(model: EagerModel, target: Target) -> ir.Model:
        graph = ir.load(exported)
        graph.opset_imports[""] = 19
        return graph

    monkeypatch.setattr(compiler, "export", staying)
    with pytest.raises(ExportError, match="asked for opset 18 and IR 8, the file has opset 19 and IR 8"):
        build(options)
    with pytest.raises(SystemExit) as ended:
        cli.main(["build", "--opset", "17"])
    assert ended.value.code == 2


def _domains(file: Path) -> Counter[str]:
    return Counter(node.domain or "ai.onnx" for node in ir.load(file).graph.all_nodes())


def test_b076_domains_are_listed_with_their_nodes_and_none_is_of_the_build_machine(
    cls_artifact: Path, cls_int8: Path, hf_artifact: Path
) -> None:
    for folder in (cls_artifact, cls_int8, hf_artifact):
        listed = {name: used["nodes"] for name, used in read_manifest(folder)["domains"].items()}
        assert listed == dict(_domains(folder / "model.onnx"))
        assert set(listed) == {"ai.onnx", "com.microsoft"}


def test_b076_the_portable_build_has_standard_operators_alone(
    cls_artifact: Path, cls_weights: Path, tmp_path: Path
) -> None:
    """Against the fused artifact; each is within the bound of eager, so they are within twice of each other."""
    asked = BuildOptions("classifier", weights=str(cls_weights), quantize="none", ops="standard", output=tmp_path / "a")
    folder = build(asked)
    assert set(read_manifest(folder)["domains"]) == {"ai.onnx"} == set(_domains(folder / "model.onnx"))
    found, expected = (Model(each, threads=1).run_arrays(_FEEDS)["logits"] for each in (folder, cls_artifact))
    assert np.abs(found - expected).max() <= 2 * fidelity_bound(float(np.abs(expected).max()))


_ACME = """
import torch
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        if torch.onnx.is_in_onnx_export():
            return torch.onnx.ops.symbolic("acme::Doubled", (x,), {}, dtype=x.dtype, shape=x.shape, version=1)
        return 2 * x
"""


def test_b078_an_operator_that_the_runtime_lacks_is_refused_by_domain_and_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no way to declare a library of operators: an artifact needs nothing but ONNX Runtime."""
    (tmp_path / "acme.py").write_text(_ACME)
    given = [f"{tmp_path / 'acme.py'}:Net", "--input", "x:float32[rows,4]", "--quantize", "none"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["build", *given, "-o", str(tmp_path / "a")])
    assert ended.value.code != 0
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "acme" in error and "Doubled" in error
    assert not (tmp_path / "a").exists()


_LATER: dict[str, tuple[str, str]] = {
    "an opset that no release takes": ('<ir_version: 8, opset_import: ["" : 99]>', "opset 99 and IR 8"),
    "an IR that no release takes": ('<ir_version: 99, opset_import: ["" : 18]>', "opset 18 and IR 99"),
}


@pytest.mark.parametrize("kind", _LATER)
def test_b070_a_version_that_no_runtime_takes_is_an_error(kind: str) -> None:
    head, message = _LATER[kind]
    with pytest.raises(ExportError, match=f"no ONNX Runtime is known that takes {message}"):
        least_onnxruntime(graph_from_text(f"{head} g (float[2] x) => (float[2] y) {{ y = Neg(x) }}"))
