"""The benchmark: the form of its JSON, sizes within bounds, the lines for people, and contenders with planted times."""

from __future__ import annotations

import builtins
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tx_export import benchmark, compiler
from tx_export.errors import ArtifactError, TxExportError
from tx_export.load import load
from tx_export.runtime import UsageError, read_manifest
from tx_export.timing import Contender, Plan, Shape, Timing

_QUICK = Plan(pause=0.0, seconds=0.0, timeout=60.0)
_KEYS = {"contender", "batch", "tokens", "p50_ms", "p95_ms", "tokens_per_s", "peak_rss_mb", "load_ms"}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Contender], list[Shape], dict[str, Any]]]:
    """Times instead of workers: 1 ms a row, twice that for eager and half of it for compile; returns what was asked."""
    asked: list[tuple[list[Contender], list[Shape], dict[str, Any]]] = []
    factor = {"eager": 2.0, "compile": 0.5}

    def measure(
        contenders: list[Contender], shapes: list[Shape], progress: Callable[[str], None], plan: Plan | None
    ) -> list[Timing]:
        feeds = {str(shape): dict(np.load(Path(contenders[0].load["feeds"]) / f"{shape}.npz")) for shape in shapes}
        asked.append((contenders, shapes, feeds))
        times = [(each, shape, factor.get(each.name, 1.0) * shape.batch) for shape in shapes for each in contenders]
        return [Timing(each.name, "cpu", shape, ((ms,) * 5,) * 5, 99.0, 10.0, 50.0) for each, shape, ms in times]

    monkeypatch.setattr(benchmark, "measure", measure)
    return asked


def _bench(artifact: Path, **changes: Any) -> dict[str, Any]:
    lines: list[str] = []
    options: dict[str, Any] = {
        "source": None, "batch": (1, 4), "tokens": (16, 128), "against": ("eager", "compile"), "threads": 2,
    }  # fmt: skip
    report = benchmark.bench(artifact, **(options | changes), progress=lines.append)
    return report | {"progress": lines}


def test_the_report_has_the_promised_form(small_artifact: Path, planted: list[Any]) -> None:
    report = _bench(small_artifact)
    assert report["threads"] == 2
    assert report["cpu"] and report["onnxruntime"]
    assert [(row["batch"], row["tokens"]) for row in report["rows"][::3]] == [(1, 16), (1, 128), (4, 16), (4, 128)]
    assert [row["contender"] for row in report["rows"][:3]] == ["eager", "compile", "small"]
    assert all(row.keys() >= _KEYS | {"first_ms", "provider", "spread", "calls"} for row in report["rows"])
    eager = report["rows"][6]  # 4x16, 2 ms a row
    assert (eager["p50_ms"], eager["p95_ms"], eager["tokens_per_s"], eager["first_ms"]) == (8.0, 8.0, 8000.0, 99.0)
    assert eager["against_artifact"] == {"ratio": 2.0, "verdict": "slower"}
    assert report["rows"][2]["against_artifact"] is None
    assert json.loads(json.dumps(report)) == report


def test_every_contender_gets_the_same_threads_and_feeds(small_artifact: Path, planted: list[Any]) -> None:
    _bench(small_artifact, threads=1)
    ((contenders, _, _),) = planted
    assert len({each.load["feeds"] for each in contenders}) == 1
    assert {each.load["threads"] for each in contenders} == {1}
    assert all(each.environment.get("OMP_NUM_THREADS") == "1" for each in contenders if each.name != "small")


def test_feeds_are_full_seeded_and_within_their_ranges(small_artifact: Path, planted: list[Any]) -> None:
    _bench(small_artifact, against=())
    _bench(small_artifact, against=())
    first, second = planted[0][2], planted[1][2]
    highest = next(item["range"][1] for item in read_manifest(small_artifact)["inputs"] if item["name"] == "input_ids")
    assert set(first) == {"1x16", "1x128", "4x16", "4x128"}
    for shape, feeds in first.items():
        assert feeds["input_ids"].shape == tuple(map(int, shape.split("x")))
        assert feeds["attention_mask"].all()
        assert feeds["input_ids"].min() >= 0
        assert feeds["input_ids"].max() <= highest
        assert len(np.unique(feeds["input_ids"])) > 8
        assert all((feeds[name] == second[shape][name]).all() for name in feeds)


def test_sizes_over_the_bound_are_dropped_and_said(small_artifact: Path, planted: list[Any]) -> None:
    report = _bench(small_artifact, tokens=(16, 513, 512), against=())
    assert [row["tokens"] for row in report["rows"]] == [16, 512, 16, 512]
    assert "tokens 513 is left out: the artifact takes up to 512" in report["progress"]


def test_no_size_left_is_a_usage_error(small_artifact: Path) -> None:
    with pytest.raises(UsageError, match=r"^bench: no size is within the bounds of .*small$"):
        _bench(small_artifact, tokens=(1000,))


def test_an_unknown_contender_is_a_usage_error_that_lists_the_known(small_artifact: Path) -> None:
    with pytest.raises(UsageError, match=r"^bench: unknown contender 'jit'; known: eager, compile, fp32$"):
        _bench(small_artifact, against=("eager", "jit"))


def test_a_folder_that_is_no_artifact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="missing, so this is not an artifact"):
        _bench(tmp_path)


def test_a_source_with_other_weights_is_refused_before_anything_is_timed(
    small_artifact: Path, tmp_path: Path, planted: list[Any]
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(small_artifact, folder)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    (folder / "manifest.json").write_text(json.dumps(manifest | {"weights": "checkpoint 0123"}), encoding="utf-8")
    with pytest.raises(TxExportError, match="checkpoint 0123"):
        _bench(folder)
    assert not planted


def test_fp32_is_a_build_of_the_same_model_without_quantization(
    small_artifact: Path, planted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[compiler.BuildOptions] = []

    def build(options: compiler.BuildOptions, progress: Callable[[str], None]) -> Path:
        built.append(options)
        return small_artifact

    monkeypatch.setattr(compiler, "build", build)
    report = _bench(small_artifact, against=("fp32",), batch=(1,), tokens=(16,))
    assert [row["contender"] for row in report["rows"]] == ["fp32", "small"]
    (options,) = built
    assert options.quantize == "none"
    same = load(
        options.source, settings=options.settings, weights=options.weights, max_length=options.max_length,
        inputs=options.inputs, task=options.task,
    )  # fmt: skip
    reference = compiler.source_of(read_manifest(small_artifact), None)
    assert (same.weights, same.config, same.inputs) == (reference.weights, reference.config, reference.inputs)


def test_b115_the_lines_for_people_say_slower_when_it_is_slower(small_artifact: Path, planted: list[Any]) -> None:
    report = _bench(small_artifact, batch=(1,), tokens=(16,))
    assert benchmark.remarks(report) == [
        "1x16: small is 2 times as fast as eager",
        "1x16: small is 100% slower than compile here",
    ]
    report["rows"][0] |= {"spread": 0.34, "against_artifact": {"ratio": 1.2, "verdict": "within noise"}}
    assert benchmark.remarks(report)[:2] == [
        "1x16: small and eager are within noise",
        "eager 1x16: rounds differ by 34%; the machine was not quiet enough",
    ]


def test_the_table_has_a_row_per_measurement_and_the_first_call_apart(
    small_artifact: Path, planted: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    report = _bench(small_artifact)
    table = benchmark.table(report)
    assert table.row_count == len(report["rows"]) == 12
    Console(width=140, file=sys.stdout).print(table)
    shown = capsys.readouterr().out
    assert (
        "first ms" in shown and "99.00" in shown and "calls" in shown and "small is 2 times as fast as eager" in shown
    )


def test_the_chart_is_a_png_and_says_what_it_needs(
    small_artifact: Path, planted: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = _bench(small_artifact)
    benchmark.chart(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(TxExportError, match=r"no/bench.png: can't write the chart: No such file"):
        benchmark.chart(report, tmp_path / "no" / "bench.png")
    found = builtins.__import__

    def without_matplotlib(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(TxExportError, match=r"^a chart needs matplotlib: pip install 'tx-export\[plot\]'$"):
        benchmark.chart(report, tmp_path / "bench.png")


def test_the_artifact_and_eager_are_timed_in_processes_of_their_own(small_artifact: Path) -> None:
    report = _bench(small_artifact, batch=(1,), tokens=(4,), against=("eager",), threads=1, plan=_QUICK)
    eager, ours = report["rows"]
    assert (eager["contender"], eager["provider"], ours["provider"]) == ("eager", "torch", "cpu")
    assert all(row["p50_ms"] > 0 and row["load_ms"] > 0 and row["calls"] == 25 for row in (eager, ours))
    # PyTorch's libraries alone are over 100 MB: the artifact's process must be without them.
    assert ours["peak_rss_mb"] + 100 < eager["peak_rss_mb"]


def test_the_report_of_an_artifact_holds_the_newest_medians_only(tmp_path: Path) -> None:
    path = tmp_path / "REPORT.md"
    path.write_text("# small\n\nwhat was done\n\n", encoding="utf-8")
    row = {"contender": "small", "provider": "cpu", "batch": 1, "tokens": 16, "p50_ms": 1.5, "p95_ms": 2.0,
           "first_ms": 9.0, "calls": 25, "tokens_per_s": 1.0, "peak_rss_mb": 3.0, "load_ms": 4.0, "spread": 0.0,
           "against_artifact": None}  # fmt: skip
    for milliseconds in (7.25, 1.5):
        report = {"artifact": "small", "cpu": "a CPU", "threads": 2, "onnxruntime": "1", "torch": "2"}
        benchmark.record(report | {"rows": [row | {"p50_ms": milliseconds}]}, path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# small\n\nwhat was done\n\n## Latency\n")
    assert text.count("## Latency") == 1
    assert "| small | cpu | 1 | 16 | 1.5 | 2.0 | 9.0 | 25 |" in text
    assert "7.25" not in text
