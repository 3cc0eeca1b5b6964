"""`inspect --profile`: the kernels that ran, and their share of the time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tx_export._profile import _most_tokens, profile
from tx_export.cli import program
from tx_export.errors import ArtifactError

from .artifact import make_artifact


def test_every_operator_that_ran_is_counted_and_the_shares_are_of_one_whole(tmp_path: Path) -> None:
    (report,) = profile(make_artifact(tmp_path / "a"))
    assert (report["file"], report["run"]) == ("model.onnx", "1x16")  # its limit
    assert "Gather" in {row["operator"] for row in report["operators"]}
    assert sum(row["share"] for row in report["operators"]) == pytest.approx(1, abs=0.001 * len(report["operators"]))
    assert report["ms"] == pytest.approx(sum(row["ms"] for row in report["operators"]), abs=0.001)


def test_no_more_tokens_are_read_than_the_artifact_takes() -> None:
    inputs: list[dict[str, Any]] = [{"dims": ["batch", "tokens<=64"]}, {"dims": [1, 3]}]
    assert _most_tokens({"inputs": inputs}) == 64
    assert _most_tokens({"inputs": inputs, "generation": {"cache": {"max_length": 48}}}) == 48
    assert _most_tokens({"inputs": inputs[1:], "generation": None}) == 128


def test_the_command_shows_it_behind_the_manifest_and_leaves_nothing(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    before = sorted(path.name for path in folder.iterdir())
    shown = CliRunner().invoke(program, ["inspect", str(folder), "--profile"])
    assert shown.exit_code == 0 and "ms in operators" in shown.output
    printed = json.loads(
        CliRunner().invoke(program, ["inspect", str(folder / "model.onnx"), "--profile", "--json"]).output
    )
    assert printed["nodes"] and printed["profile"][0]["operators"]
    assert "profile" not in json.loads(CliRunner().invoke(program, ["inspect", str(folder), "--json"]).output)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_file_that_cant_be_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"not a graph")
    with pytest.raises(ArtifactError, match=r"broken\.onnx: can't be profiled: "):
        profile(tmp_path / "broken.onnx")
