"""Cases of providers and devices: what was asked for and isn't there, the self-test, operators that stop a device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn

from tx_export._manifest import describe
from tx_export._report import report
from tx_export.artifact import seal, write_graph
from tx_export.benchmark import bench
from tx_export.errors import ProviderError, TxExportError
from tx_export.passes import Pipeline
from tx_export.providers.cpu import Cpu
from tx_export.providers.cuda import Cuda
from tx_export.runtime import Model, main, read_manifest, self_test
from tx_export.testing import eager_model, graph_from_text

_RECORD = {"pass": "export", "kind": "fidelity", "budget": "", "outputs": {}, "invariance": {}}


@pytest.fixture
def for_cuda(cls_artifact: Path, tmp_path: Path) -> Path:
    """The classifier as a build for cuda leaves it, on a machine with the CPU package."""
    folder = Path(shutil.copytree(cls_artifact, tmp_path / "cuda"))
    seal(folder, read_manifest(folder) | {"session": {"cuda": Cuda().session()}})
    return folder


_MISSING = "provider cuda: CUDAExecutionProvider isn't available; onnxruntime .* here has .*CPUExecutionProvider"


def test_b175_a_provider_that_is_not_here_is_named_with_those_that_are(for_cuda: Path, cls_artifact: Path) -> None:
    with pytest.raises(ProviderError, match=_MISSING):
        Model(for_cuda)
    with pytest.raises(ProviderError, match=r"provider cuda: .* settings for cpu only; .*CPUExecutionProvider"):
        Model(cls_artifact, provider="cuda")
    with pytest.raises(ProviderError, match="provider tensorrt: this artifact has settings for cpu only"):
        Model(cls_artifact, provider="tensorrt")


@pytest.mark.parametrize("options", [["good"], ["--bench"], ["--self-test"]])
def test_b175_run_bench_and_self_test_fail_rather_than_fall_back(
    for_cuda: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    # There is no flag to fall back: nothing runs on another provider than the one that was asked for.
    assert main([*options, "--provider", "cuda"], for_cuda) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: provider cuda: ") and "CPUExecutionProvider" in error


def test_b175_a_benchmark_of_what_can_not_run_here_fails(for_cuda: Path) -> None:
    with pytest.raises(TxExportError, match=rf"contender .*: ProviderError: {_MISSING}"):
        bench(
            for_cuda, source=None, batch=(1,), tokens=(16,), against=(), threads=1, progress=lambda line: None,
        )  # fmt: skip


def test_b179_the_self_test_needs_no_torch_and_shows_difference_and_provider(cls_artifact: Path) -> None:
    code = """
import runpy, sys
sys.modules["torch"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    command = [sys.executable, "-c", code, str(cls_artifact / "run.py"), "--self-test"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0 and "logits: largest difference " in done.stdout
    assert "provider: cpu (CPUExecutionProvider)" in done.stdout


@pytest.mark.parametrize("kind", ["cls_artifact", "cls_int8"])
@pytest.mark.parametrize("change", [0.5, np.nan])
def test_b179_a_changed_sample_fails_the_self_test(
    kind: str, change: float, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "a"))
    with np.load(folder / "samples.npz") as samples:
        arrays = dict(samples)
    name = next(name for name in sorted(arrays) if "/output/" in name)
    arrays[name] = arrays[name].copy()
    arrays[name][0] += change * np.abs(arrays[name]).max() * 10
    np.savez(folder / "samples.npz", allow_pickle=False, **arrays)
    seal(folder, read_manifest_of(folder))
    assert self_test(Model(folder, threads=1))["agrees"] is False


def read_manifest_of(folder: Path) -> dict[str, object]:
    """As it stands, though a file of the artifact was changed."""
    return dict(json.loads((folder / "manifest.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("kind", ["cls_artifact", "cls_int8", "hf_artifact"])
def test_b182_our_models_have_no_control_flow(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    assert read_manifest(folder)["control_flow"] == {"If": 0, "Loop": 0, "Scan": 0}
    assert "Control flow: 0 If, 0 Loop, 0 Scan." in (folder / "REPORT.md").read_text(encoding="utf-8")


def test_b182_control_flow_of_a_users_module_is_counted_in_the_report_inner_graphs_too(tmp_path: Path) -> None:
    graph = graph_from_text("""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[n] x, bool c) => (float[n] y) {
            y = If (c) <
                then_branch = t () => (float[n] a) {
                    a = If (c) <then_branch = u () => (float[n] e) { e = Neg (x) },
                                else_branch = v () => (float[n] f) { f = Abs (x) }>
                },
                else_branch = w () => (float[n] b) { b = Identity (x) }
            >
        }
    """)
    write_graph(graph, tmp_path / "model.onnx")
    model = eager_model(nn.Identity(), ["x:float32[n]", "c:bool[]"], ["y:float32[n]"])
    verification = {"passes": [_RECORD], "overall": _RECORD}
    manifest = describe(ir.load(tmp_path / "model.onnx"), model, Cpu(), Pipeline(()), verification, {})
    assert manifest["control_flow"] == {"If": 2, "Loop": 0, "Scan": 0}
    assert "Control flow: 2 If, 0 Loop, 0 Scan." in report(manifest)


def test_b184_a_runtime_that_is_too_old_is_told_before_a_session_is_made(
    cls_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(cls_artifact, tmp_path / "a"))
    seal(folder, read_manifest(folder) | {"min_onnxruntime": "99.0"})
    for options in (["good"], ["--self-test"], ["--bench"]):
        assert main(options, folder) == 1
        out, error = capsys.readouterr()
        assert out == "" and error.startswith("error: onnxruntime is too old: needs >= 99.0, found ")
