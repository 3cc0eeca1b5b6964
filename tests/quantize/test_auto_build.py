"""A build with `auto`: what it decides stands in the manifest, times only in the report, and a repeat is the same file.

Times are told to the pass, so none is measured.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tx_export.compiler import BuildOptions, build
from tx_export.runtime import read_manifest
from tx_export.testing import tiny_bert_folder

from .auto_models import QUICK, told, untimed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Built with `auto`, and built again from the recorded pipeline, in which nothing may be timed."""
    base = tmp_path_factory.mktemp("auto")
    source = str(tiny_bert_folder(base / "source", pooling=("mean", "normalize")))
    with pytest.MonkeyPatch.context() as patch:
        told(patch, QUICK, {})
        first = build(BuildOptions(source=source, quantize="auto", budget="sqnr_db=24", output=base / "first"))
    with pytest.MonkeyPatch.context() as patch:
        untimed(patch)
        pipeline = read_manifest(first)["pipeline"]
        return first, build(BuildOptions(source=source, passes=pipeline, output=base / "second"))


def test_a_build_from_the_recorded_pipeline_gives_the_same_bytes(folders: tuple[Path, Path]) -> None:
    first, second = folders
    assert (first / "model.onnx").read_bytes() == (second / "model.onnx").read_bytes()
    pipeline = read_manifest(first)["pipeline"]
    assert "auto" not in pipeline and "only=" in pipeline
    assert read_manifest(second)["pipeline"] == pipeline


def test_the_budget_holds_on_the_text_that_only_judges(folders: tuple[Path, Path]) -> None:
    record = read_manifest(folders[0])["verification"]["passes"][-1]
    assert record["pass"] == "auto" and record["budget"] == "sqnr_db=24"
    assert all(found["sqnr_db"] >= 24 for found in record["outputs"].values())


def test_times_stand_in_the_report_and_nowhere_else(folders: tuple[Path, Path]) -> None:
    report = (folders[0] / "REPORT.md").read_text(encoding="utf-8")
    assert "## Precision of each product" in report and "\n-> " in report
    quantized = read_manifest(folders[0])["quantized"]
    assert quantized["done"] + len(quantized["left"]) == quantized["of"]
    assert not [left for left in quantized["left"] if " ms" in left["reason"] or " us" in left["reason"]]
