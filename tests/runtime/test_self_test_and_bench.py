"""The artifact tests and times itself."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tx_export.runtime import ArtifactError, Model, UsageError, bench, main, self_test

from .artifact import HEAD, edit_manifest, logits, make_artifact, seal

IDS, MASK = np.array([[2, 4, 6, 3], [2, 5, 3, 0]]), np.array([[1, 1, 1, 1], [1, 1, 1, 0]])


def with_samples(folder: Path, limit: dict[str, Any], **arrays: np.ndarray) -> Path:
    """Replace the samples and what they must reach."""
    feeds = {"case0/input/input_ids": IDS, "case0/input/attention_mask": MASK, "case0/mask_kind": np.array("ragged")}
    np.savez(folder / "samples.npz", allow_pickle=False, **(feeds | arrays))
    edit_manifest(folder, lambda manifest: manifest | {"verification": {"self_test": limit}})
    return seal(folder)


def outcome(folder: Path) -> dict[str, Any]:
    return dict(self_test(Model(folder, threads=1))["outputs"]["logits"])


def test_b179_samples_that_agree_end_with_0_and_show_difference_and_provider(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--self-test"], make_artifact(tmp_path / "a")) == 0
    output, provider = capsys.readouterr().out.splitlines()
    assert output.startswith("logits: largest difference ") and output.endswith("limit max_abs 1e-05): agrees")
    assert provider == "provider: cpu (CPUExecutionProvider), 1 samples"


def test_b179_a_sample_that_was_tampered_with_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = logits(IDS, MASK).astype(np.float32)
    wrong[1, 0] += 0.01
    folder = with_samples(make_artifact(tmp_path / "a"), {"max_abs": 1e-3}, **{"case0/output/logits": wrong})
    assert main(["--self-test", "--json"], folder) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["agrees"] is False and abs(report["outputs"]["logits"]["max_abs"] - 0.01) < 1e-5


def test_the_ratio_is_that_of_the_formula_and_either_limit_is_enough(tmp_path: Path) -> None:
    right = logits(IDS, MASK)
    noisy = (right + 0.01 * np.array([[1, -1], [1, 1]])).astype(np.float32)
    ratio = 10 * np.log10((noisy.astype(np.float64) ** 2).sum() / (4 * 0.01**2))
    folder = make_artifact(tmp_path / "a")
    # The logits of the session are rounded to float32: 1e-6 of a difference of 0.01, far below 0.01 dB.
    for limit, agrees in (
        ({"logits": {"sqnr_db": ratio - 0.01}}, True),
        ({"logits": {"sqnr_db": ratio + 0.01}}, False),
        ({"sqnr_db": ratio + 0.01, "max_abs": 0.011}, True),
        ({"sqnr_db": ratio + 0.01, "max_abs": 0.009}, False),
        ({"logits": {}}, False),
    ):
        found = outcome(with_samples(folder, limit, **{"case0/output/logits": noisy}))
        assert found["agrees"] is agrees and abs(found["sqnr_db"] - ratio) < 0.01


def test_values_that_are_not_finite_never_agree_even_on_both_sides(tmp_path: Path) -> None:
    expected = {"case0/output/logits": np.array([[np.nan, 1], [np.inf, 1]], np.float32)}
    head = HEAD * np.array([np.inf, 1], np.float32)
    both = with_samples(make_artifact(tmp_path / "both", head=head), {"max_abs": 1e9, "sqnr_db": -1e9}, **expected)
    found = outcome(both)
    assert found["agrees"] is False and found["non_finite"] == 4 and found["max_abs"] is None


def test_padding_is_left_out_of_the_comparison(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a", per_token=True, task="feature-extraction")
    [right] = (Model(folder, threads=1).run_arrays({"input_ids": IDS, "attention_mask": MASK}).values(),)
    for place, agrees in (((1, 3), True), ((1, 2), False)):
        expected = next(iter(right)).copy()
        expected[place] += 100
        found = outcome(with_samples(folder, {"max_abs": 1e-5}, **{"case0/output/logits": expected}))
        assert found["agrees"] is agrees


def test_a_sample_of_another_shape_is_an_error(tmp_path: Path) -> None:
    folder = with_samples(make_artifact(tmp_path / "a"), {"max_abs": 1}, **{"case0/output/logits": np.zeros((2, 3))})
    with pytest.raises(ArtifactError, match=r"samples\.npz: output 'logits' has shape \[2, 2\], not \[2, 3\]"):
        self_test(Model(folder))


def test_samples_that_hold_objects_or_are_damaged_are_refused(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    np.savez(folder / "samples.npz", allow_pickle=True, **{"case0/output/logits": np.array([{}], object)})
    for damage in (None, b"PK\x03\x04 nonsense", b""):
        if damage is not None:
            (folder / "samples.npz").write_bytes(damage)
        with pytest.raises(ArtifactError, match=r"samples\.npz: can't be read"):
            self_test(Model(seal(folder)))


def test_an_artifact_without_samples_can_not_be_tested(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a", verification={})
    with pytest.raises(ArtifactError, match=r"has no samples\.npz with limits"):
        self_test(Model(folder))


def test_b183_a_runtime_that_kills_its_process_is_named_with_signal_and_cpu(tmp_path: Path) -> None:
    folder, package = make_artifact(tmp_path / "a"), tmp_path / "path" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(folder / "run.py"), "--self-test"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and done.stderr.startswith("error: onnxruntime ")
    assert "crashed with SIGILL when imported on this CPU (" in done.stderr


def test_a_bench_gives_a_row_for_each_size(tmp_path: Path) -> None:
    report = bench(make_artifact(tmp_path / "a"), [1, 3], [2, 16], threads=1, seconds=0.01)
    assert [(row["batch"], row["tokens"]) for row in report["rows"]] == [(1, 2), (3, 2), (1, 16), (3, 16)]
    assert set(report) == {"rows", "threads", "cpu", "onnxruntime"} and report["threads"] == 1
    row = report["rows"][1]
    promised = {"contender", "batch", "tokens", "p50_ms", "p95_ms", "tokens_per_s", "peak_rss_mb", "load_ms"}
    assert promised <= set(row) and row["contender"] == "tiny" and row["provider"] == "cpu"
    assert 0 < row["p50_ms"] <= row["p95_ms"] and row["first_ms"] > 0 and row["runs"] >= 5
    # Definition: tokens of one call over its median time; the median itself is rounded to 1e-4 ms.
    assert abs(row["tokens_per_s"] * row["p50_ms"] / 6000 - 1) <= 1e-4 / row["p50_ms"] + 1e-3


def test_a_bench_drops_lengths_over_the_bound_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--bench", "--batch", "1", "--tokens", "2,17,99"], make_artifact(tmp_path / "a")) == 0
    out, error = capsys.readouterr()
    assert [row["tokens"] for row in json.loads(out)["rows"]] == [2]
    assert error.startswith("notice: bench: 17, 99 tokens are over the bound of 16; left out\n")


def test_b196_a_bench_on_a_busy_machine_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A stand-in clock: every tenth call takes five times as long.
    ticks = itertools.count()
    clock = [0.0]

    def tick(self: Model, feeds: Any) -> dict[str, np.ndarray]:
        clock[0] += 0.005 if next(ticks) % 10 == 0 else 0.001
        return {}

    monkeypatch.setattr(Model, "run_arrays", tick)
    monkeypatch.setattr("tx_export.runtime.time.perf_counter", lambda: clock[0])
    bench(make_artifact(tmp_path / "a"), [1], [2], threads=1, seconds=0.1)
    assert "notice: bench: 1 x 2 tokens took 1 ms and sometimes 5; is the machine busy?" in capsys.readouterr().err


def test_a_bench_of_nothing_is_a_usage_error(tmp_path: Path) -> None:
    for batches, tokens in (([], [1]), ([1], []), ([0], [1])):
        with pytest.raises(UsageError, match="bench: batch and tokens are numbers from 1 up"):
            bench(tmp_path, batches, tokens)


def test_b177_the_first_call_of_a_shape_is_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in for a provider that builds an engine for each new shape.
    seen: set[tuple[int, ...]] = set()
    clock = [0.0]
    run = Model.run_arrays

    def slow_at_first(self: Model, feeds: Any) -> dict[str, np.ndarray]:
        shape = feeds["input_ids"].shape
        clock[0] += 0.001 if shape in seen else 1.0
        seen.add(shape)
        return run(self, feeds)

    monkeypatch.setattr(Model, "run_arrays", slow_at_first)
    monkeypatch.setattr("tx_export.runtime.time.perf_counter", lambda: clock[0])
    for row in bench(make_artifact(tmp_path / "a"), [1], [2, 4, 8], threads=1, seconds=0.01)["rows"]:
        assert row["first_ms"] == 1000 and row["p50_ms"] == row["p95_ms"] == 1


def test_inputs_without_a_range_and_of_other_kinds_are_drawn_too(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "a")
    edit_manifest(folder, lambda m: m | {"inputs": [{**item, "range": None} for item in m["inputs"]]})
    assert bench(folder, [1], [2], threads=1, seconds=0.01)["rows"][0]["runs"] >= 5
