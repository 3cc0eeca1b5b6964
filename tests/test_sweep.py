"""Sweeps: their lists, rows, frontier and table, and what is left of one that is stopped."""

from __future__ import annotations

import builtins
import ctypes
import dataclasses
import json
import logging
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tx_export import _sweep_latency, _sweep_report, cli, compiler, sweep
from tx_export._sweep_points import points_of
from tx_export._sweep_record import Record
from tx_export.artifact import check_target, staged
from tx_export.compiler import BuildOptions
from tx_export.errors import ArtifactError, BudgetError, PluginError, TxExportError
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.metrics import FIDELITY_DB, Budget
from tx_export.runtime import Model, UsageError, read_manifest
from tx_export.spec import EagerModel
from tx_export.sweep import SweepOptions, frontier
from tx_export.testing import tiny_bert_folder, tiny_tokenizer
from tx_export.timing import Contender, Plan, Shape, Timing
from tx_export.verify import Judge

_QUICK = Plan(pause=0.0, seconds=0.0, timeout=60.0)
_INT8 = "dynamic_int8{min_elements=1}"

Points = list[tuple[float, float]]
_POINTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)  # small numbers: many ties


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """The definition: nowhere higher, somewhere lower."""
    no_worse = one[0] <= other[0] and one[1] <= other[1]
    return no_worse and (one[0] < other[0] or one[1] < other[1])


@given(_POINTS)
def test_nothing_beats_a_point_of_the_frontier_and_the_frontier_beats_every_other(points: Points) -> None:
    best = [point for point, marked in zip(points, frontier(points), strict=True) if marked]
    assert not any(_beats(other, point) for point in best for other in points)
    assert all(any(_beats(point, other) for point in best) for other in points if other not in best)


@given(_POINTS, st.randoms(use_true_random=False))
def test_the_frontier_does_not_depend_on_the_order(points: Points, random: Any) -> None:
    shuffled = random.sample(points, len(points))
    assert dict(zip(points, frontier(points), strict=True)) == dict(zip(shuffled, frontier(shuffled), strict=True))


@given(_POINTS.filter(bool), st.tuples(st.integers(0, 3), st.integers(1, 3)))
def test_a_point_that_is_beaten_changes_nothing(points: Points, worse: tuple[int, int]) -> None:
    beaten = (points[0][0] + worse[0], points[0][1] + worse[1])
    assert frontier([*points, beaten]) == [*frontier(points), False]


def _names(prune_heads: str = "0", prune_ffn: str = "0", quantize: str = "none") -> list[str]:
    return [point.name for point in points_of(prune_heads, prune_ffn, quantize, BuildOptions())]


def test_points_are_all_combinations_and_options_of_a_pass_hold_commas() -> None:
    found = _names("0, 0.25", quantize="none,blockwise{bits=4, block_size=32},dynamic_int8")
    passes = ["none", "blockwise-bits=4-block_size=32", "dynamic_int8"]
    assert found == [f"heads{ratio}-{name}" for ratio in ("0", "0.25") for name in passes]
    assert _names("0.5", "0,0.125") == ["heads0.5-none", "heads0.5-ffn0.125-none"]


@pytest.mark.parametrize(
    ("lists", "kind", "message"),
    [
        ({"quantize": ""}, UsageError, r"^--quantize '': the list is empty$"),
        ({"quantize": "none,,dynamic_int8"}, UsageError, r"^--quantize 'none,,dynamic_int8': an item is empty$"),
        ({"prune_heads": " "}, UsageError, r"^--prune-heads ' ': the list is empty$"),
        ({"prune_heads": "0,1.01"}, UsageError, r"^--prune-heads: '1.01' is not a ratio from 0 to 1, say 0,0.25,0.5$"),
        ({"prune_heads": "nan"}, UsageError, r"^--prune-heads: 'nan' is not a ratio"),
        ({"prune_ffn": "-0.5"}, UsageError, r"^--prune-ffn: '-0.5' is not a ratio"),
        ({"prune_heads": "0:1"}, UsageError, r"^--prune-heads: '0:1' is not a ratio"),
        ({"prune_heads": "0.5,0.50"}, UsageError, r"^sweep: the point heads0.5-none is asked for twice$"),
        # The default, said in words.
        ({"quantize": "dynamic_int8,dynamic_int8{per_channel=true}"}, UsageError, r"channel=true is asked for twice"),
        ({"quantize": "none,int7"}, PluginError, r"^unknown pass 'int7'; known: "),
        ({"quantize": "dynamic_int8{bits=7}"}, PluginError, r"unknown option 'bits=7'; known: "),
        ({"quantize": "blockwise{bits=4"}, PluginError, r"can't read 'blockwise\{bits=4'|can't read '\{bits=4'"),
    ],
)  # fmt: skip
def test_lists_that_can_not_be_read_are_refused_before_anything_is_built(
    lists: dict[str, Any], kind: type[TxExportError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message) as refused:
        sweep.sweep(SweepOptions(tmp_path / "s", BuildOptions("no/such/folder"), **lists))
    assert refused.value.exit_code == 2
    assert not list((tmp_path / "s").iterdir())


def test_only_points_that_are_pruned_recover(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text\n" * 20)
    shared = BuildOptions(recover=text, steps=3)
    asked = [point.options(shared) for point in points_of("0,0.5", "0", "none", shared)]
    assert [(each.prune_heads, each.recover, each.steps) for each in asked] == [(None, None, None), ("0.5", text, 3)]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ({"budget": "sqnr=20"}, r"^budget: expected KEY=NUMBER, not 'sqnr=20'"),
        ({"quantize": "none"}, r"^sweep: quantize belongs to the points; it can't be shared by all$"),
        ({"size": "huge"}, r"has no size 'huge'"),
        ({"recover": Path("text.txt")}, r"^--recover: no point is pruned, so there is nothing to recover$"),
    ],
)
def test_options_that_no_point_could_have_are_refused_before_anything_is_built(
    build: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TxExportError, match=message) as refused:
        sweep.sweep(SweepOptions(tmp_path / "s", BuildOptions("classifier", **build)))
    assert refused.value.exit_code == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of texts: 2 layers of 4 heads, with a tokenizer and the labels bad, plain, good."""
    return tiny_bert_folder(tmp_path_factory.mktemp("source") / "tiny", "BertForSequenceClassification")


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs as exported, once for each number of parameters: the exporter takes seconds."""
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(scope="module", autouse=True)
def _one_export(graphs: Path) -> Iterator[None]:
    def exported(model: EagerModel, target: Target) -> ir.Model:
        path = graphs / f"{sum(parameter.numel() for parameter in model.module.parameters())}.onnx"
        if not path.exists():
            ir.save(export(model, target), path)
        return ir.load(path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiler, "export", exported)
        yield


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of label<TAB>text."""
    path = tmp_path_factory.mktemp("text") / "labelled.tsv"
    words = (("good", "fine"), ("bad", "awful"), ("plain", "some"))
    path.write_text("".join(f"{label}\t{word} {number}\n" for number in range(4) for label, word in words))
    return path


@pytest.fixture(scope="module")
def shown(folder: Path, labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> SweepOptions:
    """A real sweep that nothing is written to; one of its points can't be built."""
    build = BuildOptions(str(folder), evaluate=labelled)
    output = tmp_path_factory.mktemp("shown") / "sweep"
    options = SweepOptions(output, build, prune_heads="0,0.05,0.5,0.99", quantize="none", tokens=(), threads=1)
    sweep.sweep(options)
    return options


def _with(options: SweepOptions, **changes: Any) -> SweepOptions:
    return dataclasses.replace(options, **changes)


def _read(options: SweepOptions) -> dict[str, Any]:
    return dict(json.loads((options.output / "sweep.json").read_text(encoding="utf-8")))


def _rows(options: SweepOptions) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in _read(options)["points"]}


def test_b235_a_sweep_is_built_and_timed_in_a_folder_of_any_name(folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(folder, tmp_path / "модель 'è'")
    options = SweepOptions(
        tmp_path / "a bär 'изба' 漢字", BuildOptions(str(source)), prune_heads="0.5", prune_ffn="0.25",
        quantize=f"none,{_INT8}", tokens=(4, 33), threads=1,
    )  # fmt: skip
    lines: list[str] = []
    report = sweep.sweep(options, lines.append, _QUICK)
    assert report == _read(options) and report["complete"]
    assert "tokens 33 is left out: the artifact takes up to 32" in lines
    whole, int8 = report["points"]
    assert whole["latency"]["1x4"]["ratio"] == 1.0
    assert all(row["latency"]["1x4"][key] > 0 for row in (whole, int8) for key in ("ms", "p50_ms", "reference_p50_ms"))
    folders = {"heads0.5-ffn0.25-none", "heads0.5-ffn0.25-dynamic_int8-min_elements=1"}
    assert {path.name for path in options.output.iterdir()} == folders | {"sweep.json", "sweep.png"}
    assert (options.output / "sweep.png").read_bytes().startswith(b"\x89PNG")
    for name in folders:
        manifest = read_manifest(options.output / name)
        assert (manifest["pruned"]["done"], manifest["pruned_neurons"]["done"]) == (4, 64 // 4)
        assert (manifest["quantized"]["done"] > 0) == ("int8" in name)


def test_the_error_of_a_point_is_its_drift_from_the_whole_model(shown: SweepOptions, folder: Path) -> None:
    """The reference is the untouched eager model; what is compared are the files as they were written."""
    judge = Judge(load(str(folder)))
    rows = _rows(shown)
    for name in ("heads0-none", "heads0.5-none"):
        runner = Model(shown.output / name, threads=1).run_arrays
        (again,) = judge.check_lossy(name, runner, Budget())["outputs"].values()
        for key in ("sqnr_db", "max_abs", "cosine"):  # the same graph on the same inputs in another session
            assert rows[name][key] == pytest.approx(again[key], rel=1e-5)
        assert rows[name]["agreement"] == again["agreement"]
        assert rows[name]["bytes"] == (shown.output / name / "model.onnx").stat().st_size
    assert rows["heads0-none"]["sqnr_db"] > FIDELITY_DB > 60 > rows["heads0.5-none"]["sqnr_db"]


def test_accuracy_is_that_of_the_artifact_at_every_point(shown: SweepOptions, labelled: Path) -> None:
    """The reference is the artifact's own answers, counted here."""
    lines = [line.split("\t") for line in labelled.read_text().splitlines()]
    for name in ("heads0-none", "heads0.99-none"):
        answers = Model(shown.output / name, threads=1)([text for _, text in lines])
        right = sum(answer["label"] == label for answer, (label, _) in zip(answers, lines, strict=True))
        assert _rows(shown)[name]["accuracy"] == right / len(lines)


def test_b155_a_pruned_point_is_smaller_by_the_weights_of_its_heads(shown: SweepOptions) -> None:
    whole, pruned = (_rows(shown)[name] for name in ("heads0-none", "heads0.5-none"))
    # d_model 16, head width 4: query, key, value with their biases, and the columns of the output; 4 bytes each.
    removed = 4 * 4 * (3 * (16 * 4 + 4) + 4 * 16)
    assert whole["bytes"] - pruned["bytes"] == pytest.approx(removed, abs=64)  # lengths take fewer digits
    assert (whole["pruned"]["done"], pruned["pruned"]) == (0, {"done": 4, "of": 8, "left": []})


def test_b156_attention_is_fused_in_every_layer_of_every_point(shown: SweepOptions) -> None:
    heads = {}
    for row in _read(shown)["points"]:
        if row["status"] == "built":
            fused = read_manifest(shown.output / row["name"])["fused"]
            assert (fused["done"], fused["left"]) == (2, [])
            heads[row["prune_heads"]] = sum(row["heads_per_layer"])
    assert heads == {0: 8, 0.5: 4, 0.99: 2}


def test_b157_a_share_that_rounds_or_can_not_be_had_is_told_in_its_row(shown: SweepOptions) -> None:
    rows = _rows(shown)
    none, most = rows["heads0.05-none"], rows["heads0.99-none"]
    assert (none["status"], none.get("bytes")) == ("failed", None)
    assert "prune_heads changed nothing" in none["reason"]
    assert (most["pruned"]["done"], most["heads_per_layer"]) == (6, [1, 1])
    told = [left["reason"] for left in most["pruned"]["left"]]
    assert told == ["8 of 8 were asked for, 6 removed: a layer keeps one"]


def test_a_point_outside_its_budget_is_a_row_and_not_the_end(folder: Path, tmp_path: Path) -> None:
    build = BuildOptions(str(folder), budget="sqnr_db=60")
    options = SweepOptions(tmp_path / "sweep", build, prune_heads="0.5,0", quantize="none", tokens=())
    over, built = sweep.sweep(options)["points"]
    assert (over["status"], built["status"]) == ("over_budget", "built")
    assert "whole: output 'logits': sqnr_db" in over["reason"] and "is less than 60" in over["reason"]
    assert built["frontier"] == ["bytes"]
    assert not (options.output / over["name"]).exists()


@pytest.fixture
def options(shown: SweepOptions, tmp_path: Path) -> SweepOptions:
    """Two points, nothing timed."""
    return _with(shown, output=tmp_path / "sweep", prune_heads="0,0.5")


@pytest.fixture
def builds(shown: SweepOptions, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Builds that copy what is shown, and no chart; the names of the points that are built from here on."""
    names: list[str] = []

    def copied(asked: BuildOptions, progress: object) -> Path:
        assert asked.output is not None
        names.append(asked.output.name)
        if not (shown.output / asked.output.name).exists():
            raise BudgetError("whole: sqnr_db 5 is less than 10 in case 2x5 [left]")
        check_target(asked.output, asked.force)
        with staged(asked.output) as new:
            shutil.copytree(shown.output / asked.output.name, new, dirs_exist_ok=True)
        return asked.output

    monkeypatch.setattr(compiler, "build", copied)
    monkeypatch.setattr(sweep, "chart", lambda report, path: None)
    return names


@pytest.fixture
def planted(builds: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times instead of workers, in ms a token, by the names of the points; 1 where none is planted."""
    times: dict[str, float] = {}

    def measure(
        contenders: Sequence[Contender], shapes: Sequence[Shape], progress: Callable[[str], None], plan: object
    ) -> list[Timing]:
        def timing(name: str, shape: Shape) -> Timing:
            return Timing(name, "cpu", shape, ((times.get(name, 1.0) * shape.tokens,) * 5,) * 5, 9.0, 9.0, 9.0)

        progress(f"timing {contenders[-1].name}")
        return [timing(each.name, shape) for shape in shapes for each in contenders]

    monkeypatch.setattr(_sweep_latency, "measure", measure)
    return times


def test_a_sweep_without_any_point_is_the_error_of_its_first(options: SweepOptions, builds: list[str]) -> None:
    asked = _with(options, prune_heads="0.25,0.125")
    for _ in range(2):
        with pytest.raises(
            BudgetError, match=r"^none of the 2 points could be built; heads0.25-none: whole: sqnr_db 5"
        ):
            sweep.sweep(asked)
    assert builds == ["heads0.25-none", "heads0.125-none"], "what was refused is not tried again"


def test_a_full_disk_is_the_end_and_not_a_row(options: SweepOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(asked: BuildOptions, progress: object) -> Path:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise ArtifactError("x: can't be written: No space left on device") from error

    monkeypatch.setattr(compiler, "build", full)
    with pytest.raises(ArtifactError, match="No space left"):
        sweep.sweep(options)
    assert _read(options)["points"] == []


def test_latency_is_the_ratio_to_the_first_point_on_one_scale(options: SweepOptions, planted: dict[str, float]) -> None:
    planted |= {"heads0-none": 2.0, "heads0.5-none": 1.0}
    whole, pruned = sweep.sweep(_with(options, tokens=(4, 16)))["points"]
    assert whole["latency"]["1x16"] == {"ratio": 1.0, "p50_ms": 32.0, "reference_p50_ms": 32.0, "ms": 32.0}
    assert pruned["latency"]["1x4"] == {"ratio": 0.5, "p50_ms": 4.0, "reference_p50_ms": 8.0, "ms": 4.0}
    assert whole["frontier"] == pruned["frontier"] == ["bytes", "1x4", "1x16"]


def test_a_difference_within_noise_puts_nothing_on_the_frontier(
    options: SweepOptions, planted: dict[str, float]
) -> None:
    planted |= {"heads0.5-none": 0.99}
    whole, pruned = sweep.sweep(_with(options, tokens=(4,)))["points"]
    assert pruned["latency"]["1x4"]["ms"] == whole["latency"]["1x4"]["ms"]
    assert (whole["frontier"], pruned["frontier"]) == (["bytes", "1x4"], ["bytes"])


def test_the_table_has_a_row_for_each_point_and_marks_the_frontier(
    options: SweepOptions, planted: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    planted |= {"heads0-none": 2.0, "heads0.5-none": 3.0}
    report = sweep.sweep(_with(options, prune_heads="0,0.05,0.5", tokens=(16,)))
    Console(width=160).print(sweep.table(report))
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    megabytes = [f"{row['bytes'] / 1e6:.2f}" for row in (report["points"][0], report["points"][2])]
    cells = {line[0]: line[1:] for line in lines if line and line[0] in ("0", "0.05", "0.5")}
    assert cells["0"][-4:] == [megabytes[0], "*", "32", "*"]
    assert cells["0.5"][-3:] == [megabytes[1], "*", "48"]
    assert cells["0.05"] == ["none", "over", "budget"]
    assert " ".join(lines[-1]) == "heads0.05-none: whole: sqnr_db 5 is less than 10 in case 2x5 [left]"


@pytest.mark.usefixtures("builds")
def test_without_matplotlib_a_sweep_says_so_and_ends_well(
    options: SweepOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = builtins.__import__

    def without_matplotlib(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(sweep, "chart", _sweep_report.chart)
    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    monkeypatch.setattr(logging.getLogger("tx_export"), "propagate", True)
    assert sweep.sweep(options)["complete"]
    assert "sweep.png is not drawn: a chart needs matplotlib: pip install 'tx-export[plot]'" in caplog.messages
    assert not (options.output / "sweep.png").exists()


def test_a_notice_is_told_once_for_all_points(
    options: SweepOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(asked: BuildOptions, progress: object) -> Path:
        logging.getLogger("tx_export").warning("the weights are %s", "random")
        raise BudgetError("no")

    notices: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: notices.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(compiler, "build", told)
    monkeypatch.setattr(logging.getLogger("tx_export"), "handlers", [handler])
    for _ in range(2):
        with pytest.raises(BudgetError):
            sweep.sweep(_with(options, force=True))
    assert notices == ["the weights are random"] * 2


@pytest.mark.parametrize(("keep", "kept"), [("none", []), ("frontier", ["heads0-none"])])
@pytest.mark.usefixtures("planted")
def test_artifacts_that_shall_not_stay_are_gone_and_are_not_built_again(
    keep: Any, kept: list[str], options: SweepOptions, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "mark", lambda built: built[0].update(frontier=["bytes"]))
    asked = _with(options, keep=keep, tokens=(4,))
    report = sweep.sweep(asked)
    assert [row["name"] for row in report["points"] if row["manifest_sha256"] is not None] == kept
    assert sorted(path.name for path in asked.output.iterdir() if path.is_dir()) == kept
    assert sweep.sweep(asked) == report
    assert len(builds) == 2


def test_keeping_less_leaves_what_others_put_beside_an_artifact(options: SweepOptions, builds: list[str]) -> None:
    sweep.sweep(options)
    (options.output / "heads0-none" / "notes.txt").write_text("mine")
    sweep.sweep(_with(options, keep="none", force=True))
    assert [path.name for path in options.output.rglob("heads*/*")] == ["notes.txt"]


def test_a_sweep_that_is_interrupted_goes_on_with_what_is_missing(
    options: SweepOptions, planted: dict[str, float], builds: list[str]
) -> None:
    """Ctrl-C in front of the second build, then in the second timing."""
    asked = _with(options, prune_heads="0,0.5,0.99", tokens=(4,))
    timed: list[str] = []

    def sweep_until(stop: str) -> None:
        def progress(line: str) -> None:
            timed.extend([line] if "timing" in line else [])
            if line.endswith(stop):
                raise KeyboardInterrupt

        sweep.sweep(asked, progress)

    with pytest.raises(KeyboardInterrupt):
        sweep_until("timing heads0-none")
    assert builds == ["heads0-none", "heads0.5-none", "heads0.99-none"]
    assert [row["latency"] for row in _read(asked)["points"]] == [{}, {}, {}]
    with pytest.raises(KeyboardInterrupt):
        sweep_until("timing heads0.5-none")
    assert not _read(asked)["complete"]
    sweep_until("never")
    assert len(builds) == 3
    names = [line.partition(":")[0] for line in timed]
    assert names == ["heads0-none", "heads0-none", "heads0.5-none", "heads0.5-none", "heads0.99-none"]
    assert _read(asked)["complete"] and all(row["latency"] for row in _read(asked)["points"])


def test_a_sweep_that_is_stopped_behind_its_first_artifact_goes_on(
    options: SweepOptions, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(record: Record, row: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Record, "put", stopped)
        sweep.sweep(options)
    assert read_manifest(options.output / "heads0-none") and _read(options)["points"] == []
    assert sweep.sweep(options)["complete"]


@pytest.mark.parametrize("damage", ["missing", "cut", "manifest", "without a row"])
def test_b236_what_is_not_whole_is_built_again_and_nothing_else(
    damage: str, options: SweepOptions, planted: dict[str, float], builds: list[str]
) -> None:
    asked = _with(options, tokens=(4,))
    report = sweep.sweep(asked)
    damaged = asked.output / "heads0.5-none"
    if damage == "missing":
        shutil.rmtree(damaged)
    elif damage == "cut":
        (damaged / "model.onnx").write_bytes((damaged / "model.onnx").read_bytes()[:-1])
    elif damage == "manifest":
        (damaged / "manifest.json").write_text((damaged / "manifest.json").read_text() + " ")
    else:
        there = _read(asked) | {"points": report["points"][:1], "complete": False}
        (asked.output / "sweep.json").write_text(json.dumps(there))
    before = (asked.output / "heads0-none").stat().st_ino
    assert sweep.sweep(asked) == report
    assert builds == ["heads0-none", "heads0.5-none", "heads0.5-none"]
    assert (asked.output / "heads0-none").stat().st_ino == before
    assert read_manifest(damaged)


_STOPPED = """
import json, os, signal, sys
from pathlib import Path
import onnx_ir as ir
from tx_export import artifact, cli, compiler, runtime, _sweep_record

source, output, graphs = sys.argv[1:]
write_graphs, write_text = compiler.write_graphs, Path.write_text

def exported(model, target):
    return ir.load(f"{graphs}/{sum(each.numel() for each in model.module.parameters())}.onnx")

def half_a_graph(model, path):
    if "heads0.5" in str(path):
        (path / "model.onnx").write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)
    return write_graphs(model, path)

def half_a_record(path, text, **options):
    if path.name == ".sweep.json.new" and "heads0.5" in text:
        write_text(path, text[:100], **options)
        os.kill(os.getpid(), signal.SIGINT)
    return write_text(path, text, **options)

def run(stop):
    compiler.export = exported
    if stop == "while an artifact is written":
        compiler.write_graphs = half_a_graph
    elif stop == "while the record is written":
        Path.write_text = half_a_record
    lists = ["--prune-heads", "0,0.5", "--quantize", "none", "--tokens", "none", "--threads", "1"]
    cli.main(["sweep", source, *lists, "-o", output])

for stop in ("while an artifact is written", "while the record is written", ""):
    child = os.fork()
    if child == 0:
        run(stop)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    record = json.loads(Path(output, "sweep.json").read_text())
    whole = Path(output, "heads0-none", "manifest.json").stat().st_mtime_ns
    rows = [row["name"] for row in record["points"]]
    left = sorted(path.name for path in Path(output).iterdir() if path.name.startswith("."))
    print("state:", json.dumps([code, record["complete"], rows, whole, left]), flush=True)
"""


def test_b236_a_sweep_that_is_killed_is_continued_and_leaves_nothing_half(
    folder: Path, graphs: Path, shown: SweepOptions, tmp_path: Path
) -> None:
    """SIGKILL in the middle of an artifact, Ctrl-C in the middle of sweep.json, and then to the end."""
    done = subprocess.run(
        [sys.executable, "-c", _STOPPED, str(folder), str(tmp_path / "s"), str(graphs)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    states = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("state: ")]
    assert [state[0] for state in states] == [-signal.SIGKILL, 130, 0], done.stderr
    assert [state[1] for state in states] == [False, False, True]
    assert [state[2] for state in states] == [["heads0-none"], ["heads0-none"], ["heads0-none", "heads0.5-none"]]
    assert len({state[3] for state in states}) == 1, "the first point is built once"
    assert states[-1][4] == [], "nothing is left of what was killed"
    assert read_manifest(tmp_path / "s" / "heads0.5-none")


def test_other_options_are_refused_by_name(options: SweepOptions, builds: list[str], tmp_path: Path) -> None:
    sweep.sweep(options)
    before = _read(options)
    for changes, told in (
        ({"prune_heads": "0,0.99"}, r"prune_heads: \[0.0, 0.5\] there, \[0.0, 0.99\] here"),
        ({"quantize": "dynamic_int8"}, r'quantize: \["none"\] there, \["dynamic_int8"\] here'),
        ({"tokens": (4,)}, r"tokens: \[\] there, \[4\] here"),
        ({"threads": 2}, "threads: 1 there, 2 here"),
        ({"build": dataclasses.replace(options.build, budget="sqnr_db=5")}, "budget: null there, sqnr_db=5 here"),
        (
            {"build": dataclasses.replace(options.build, evaluate=None)},
            r"evaluate: [0-9a-f]{60}\.\.\. there, null here",
        ),
    ):
        with pytest.raises(UsageError, match=rf"sweep holds a sweep that was asked otherwise \({told}\); --force"):
            sweep.sweep(_with(options, **changes))
    assert _read(options) == before and len(builds) == 2


@pytest.mark.parametrize("changed", ["weights", "calibrate", "tokenizer"])
def test_other_contents_of_the_same_files_are_refused_by_name(
    changed: str, options: SweepOptions, builds: list[str], folder: Path, tmp_path: Path
) -> None:
    source, text = shutil.copytree(folder, tmp_path / "tiny"), tmp_path / "text.txt"
    text.write_text("some text\n" * 10)
    asked = _with(options, build=BuildOptions(str(source), calibrate=text))
    sweep.sweep(asked)
    if changed == "weights":
        tiny_bert_folder(source, "BertForSequenceClassification", seed=1)
    elif changed == "calibrate":
        text.write_text("other text\n" * 10)
    else:
        (source / "tokenizer.json").write_text(tiny_tokenizer(100))
    name = {"weights": "weights: checkpoint", "calibrate": "calibrate: ", "tokenizer": "model: "}[changed]
    with pytest.raises(UsageError, match=rf"was asked otherwise \({name}"):
        sweep.sweep(asked)
    assert len(builds) == 2


def test_other_code_of_a_user_s_module_is_refused_by_name(
    options: SweepOptions, builds: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "net.py"
    code = "import torch\nfrom torch import nn\n\nclass Net(nn.Module):\n    def forward(self, x):\n        return {}\n"
    asked = _with(options, build=BuildOptions(f"{file}:Net", inputs=("x:float32[batch,4]",)))
    file.write_text(code.format("x + 1"))
    sweep.sweep(asked)
    file.write_text(code.format("x + 2"))
    with pytest.raises(UsageError, match=r"was asked otherwise \(code: "):
        sweep.sweep(asked)


def test_b239_force_starts_anew_and_keeps_the_files_of_others(options: SweepOptions, builds: list[str]) -> None:
    sweep.sweep(options)
    notes = [options.output / "notes.txt", options.output / "heads0-none" / "notes.txt"]
    for path in notes:
        path.write_text("mine")
    with pytest.raises(UsageError, match="--force starts anew"):
        sweep.sweep(_with(options, prune_heads="0,0.99"))
    report = sweep.sweep(_with(options, prune_heads="0,0.99", force=True))
    assert [row["name"] for row in report["points"]] == ["heads0-none", "heads0.99-none"]
    assert builds == ["heads0-none", "heads0.5-none", "heads0-none", "heads0.99-none"]
    assert [path.read_text() for path in notes] == ["mine", "mine"]
    assert not (options.output / "heads0.5-none").exists()


def test_b239_folders_of_others_with_the_name_of_a_point_are_left_as_they_are(
    options: SweepOptions, shown: SweepOptions, builds: list[str]
) -> None:
    shutil.copytree(shown.output / "heads0-none", options.output / "heads0.5-none")
    with pytest.raises(ArtifactError, match=r"heads0.5-none exists already; --force replaces it"):
        sweep.sweep(options)
    (options.output / "heads0.5-none" / "manifest.json").unlink()
    for force in (False, True):
        with pytest.raises(ArtifactError, match=r"heads0.5-none exists and is not an artifact of tx-export"):
            sweep.sweep(_with(options, force=force))
    assert builds == []


@pytest.mark.parametrize("content", ["{}", "[1]", "not JSON", '{"format_version": 2}'])
def test_a_sweep_json_of_others_is_left_as_it_is(content: str, options: SweepOptions, builds: list[str]) -> None:
    options.output.mkdir()
    (options.output / "sweep.json").write_text(content)
    for force in (False, True):
        with pytest.raises(ArtifactError, match=r"sweep.json .*; it is left as it is"):
            sweep.sweep(_with(options, force=force))
    assert (options.output / "sweep.json").read_text() == content and builds == []


def _without_privilege() -> None:
    """Root may write anywhere; without this capability it is held to the permissions like everybody."""
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE


def test_b238_a_folder_that_can_not_be_written_to_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """Before the model is, even: what takes time is what is imported for that."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o555)
    command = [sys.executable, "-X", "importtime", "-m", "tx_export", "sweep", "-o", str(tmp_path / "home" / "s")]
    done = subprocess.run(command, preexec_fn=_without_privilege, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, len(lines)) == (1, 1)
    assert lines[0].startswith(f"error: {tmp_path / 'home'}") and "can't write there" in lines[0]
    assert " torch\n" not in done.stderr.replace("|", "")


def test_the_command_prints_the_record_or_the_table(
    options: SweepOptions, builds: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["sweep", str(folder), "--prune-heads", "0,0.5", "--quantize", "none", "--tokens", "none"]
    given += ["-o", str(options.output)]
    outputs = []
    for flags in (["--json"], []):
        with pytest.raises(SystemExit) as ended:
            cli.main([*given, *flags])
        assert ended.value.code == 0
        outputs.append(capsys.readouterr().out)
    assert json.loads(outputs[0]) == _read(options)
    assert "sqnr_db" in outputs[1] and len(builds) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--tokens", "16,x"],
            "error: Invalid value for '--tokens': '16,x' is not a list of positive numbers, say 1,8",
        ),
        (["--quantize", "none,"], "error: --quantize 'none,': an item is empty"),
        (["--tokens", "33,64"], "error: sweep: no length of --tokens is within the bounds of tiny"),
    ],
)
def test_usage_errors_of_the_command_end_with_2(
    flags: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["sweep", str(folder), "-o", str(tmp_path / "s"), *flags])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)
