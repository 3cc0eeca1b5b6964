"""The command line with stand-ins for the library: exit codes, error lines, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir
import pytest
from rich.table import Table

import tx_export
from tx_export import cli, errors, runtime

_MANIFEST = {
    "format_version": 1,
    "name": "toy",
    "task": "text-classification",
    "source": "classifier",
    "weights": "random seed 0",
    "pipeline": "dynamic_int8{per_channel=true}",
    "opset": 20,
    "ir_version": 10,
    "domains": {"ai.onnx": {"version": 20, "nodes": 68}, "com.microsoft": {"version": 1, "nodes": 17}},
    "min_onnxruntime": "1.20",
    "inputs": [{"name": "input_ids", "dtype": "int64", "dims": ["batch", "tokens<=512"]}],
    "outputs": [{"name": "logits", "dtype": "float32", "dims": ["batch", 2]}],
    "quantized": {"done": 3, "of": 4, "left": [{"name": "head", "reason": "too small"}]},
    "files": {"model.onnx": {"bytes": 12345, "sha256": "0" * 64}},
}


@dataclass
class Outcome:
    code: int
    out: str
    err: str


Call = Callable[..., Outcome]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs the command line in this process."""
    for name in ("PYTHONWARNINGS", "TORCH_LOGS"):
        monkeypatch.setenv(name, "")  # so that it is gone again afterwards
        monkeypatch.delenv(name)

    def run(*arguments: str) -> Outcome:
        with warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for `tx_export.compiler`, whose `build` returns a folder and whose `compare` passes."""

    @dataclass
    class BuildOptions:
        source: str | None
        size: str
        settings: dict[str, str]
        weights: str | None
        task: str | None
        inputs: tuple[str, ...]
        quantize: str | None
        prune_heads: str | None
        recover: Path | None
        steps: int | None
        passes: str | None
        calibrate: Path | None
        evaluate: Path | None
        budget: str | None
        max_length: int | None
        provider: str
        target_ort: str | None
        isa: str | None
        ops: str
        output: Path | None
        force: bool

    def build(options: BuildOptions, progress: Callable[[str], None]) -> Path:
        stand_in.options = options  # type: ignore[attr-defined]
        progress("exporting")
        logging.getLogger("tx_export.load").warning("weights are %s", "random")
        logging.getLogger("tx_export.load").info("a detail")
        logging.getLogger("torch.onnx").warning("exporter talk")
        warnings.warn("a foreign warning", UserWarning, stacklevel=1)
        print("a user's module prints")
        return Path("artifacts/toy")

    stand_in = ModuleType("tx_export.compiler")
    for name, value in {"BuildOptions": BuildOptions, "build": build}.items():
        setattr(stand_in, name, value)
    _stand_in(monkeypatch, stand_in)
    monkeypatch.setattr(runtime, "read_manifest", lambda folder: dict(_MANIFEST))
    return stand_in


def _stand_in(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """`from tx_export import NAME` looks at the package first, `import tx_export.NAME` at sys.modules."""
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tx_export, module.__name__.rpartition(".")[2], module, raising=False)


def _raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_arguments: object, **_options: object) -> Any:
        raise error

    return fail


def test_the_version_is_the_package_s(call: Call) -> None:
    assert call("--version") == Outcome(0, f"tx-export {tx_export.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing command; see tx-export --help"),
        (["bild"], "No such command 'bild'"),
        (["build", "--nonsense"], "--nonsense"),
        (["build", "--isa", "sse2"], "'sse2' is not one of 'avx2', 'vnni', 'arm64'"),
        (["build", "--isa", "avx2", "--provider", "cuda"], "--isa is for --provider cpu, not cuda"),
        (["build", "--size", "huge"], "'huge' is not one of 'small', 'medium', 'large'; see tx-export build --help"),
        (["build", "--set", "layers"], "'layers' is not KEY=VALUE, say num_layers=2"),
        (["build", "--set", "a=1", "--set", "a=2"], "a is given twice"),
        (["build", "--max-length", "0"], "0 is not in the range x>=1"),
        (["build", "--calibrate", "missing.txt"], "'missing.txt' does not exist"),
        (["build", "--passes", "gelu", "--quantize", "none"], "--passes is the whole pipeline"),
        (["build", "--passes", "gelu", "--prune-heads", "0.5"], "can't stand beside --quantize or --prune-heads"),
        (["run"], "Missing argument 'ARTIFACT'"),
        (["run", "missing"], "'missing' does not exist"),
        (["bench", ".", "--batch", "1,zero"], "'1,zero' is not a list of positive numbers, say 1,8"),
        (["bench", ".", "--tokens", "0"], "'0' is not a list of positive numbers"),
        (["bench", ".", "--against", "eager,tvm"], "unknown contender 'tvm'; known: eager, compile, fp32"),
        (["train", "bert", "--data", __file__], "bert is not a built-in model"),
        (["train", "clasifier", "--data", __file__], "unknown model 'clasifier'; known: "),
    ],
)
def test_a_usage_error_is_one_error_line_and_exit_code_2(call: Call, arguments: list[str], message: str) -> None:
    outcome = call(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1
    assert message in outcome.err


def test_build_hands_over_every_option(call: Call, compiler: ModuleType, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a line\n")
    given = "--size medium --set num_layers=2 --set d_ff=64 --weights random:3 --task fill-mask --quantize none"
    given += " --prune-heads 0:1,3;2:0 --budget sqnr_db=20 --max-length 64 --provider cuda --target-ort 1.24"
    given += " --ops standard --force"
    files = ["--calibrate", str(text), "--eval", str(text), "--output", "there", "--input", "x:float32[batch]"]
    assert call("build", "classifier", *given.split(), *files).code == 0
    assert vars(compiler.options) == {
        "source": "classifier",
        "size": "medium",
        "settings": {"num_layers": "2", "d_ff": "64"},
        "weights": "random:3",
        "task": "fill-mask",
        "inputs": ("x:float32[batch]",),
        "quantize": "none",
        "prune_heads": "0:1,3;2:0",
        "recover": None,
        "steps": None,
        "passes": None,
        "calibrate": text,
        "evaluate": text,
        "budget": "sqnr_db=20",
        "max_length": 64,
        "provider": "cuda",
        "target_ort": "1.24",
        "isa": None,
        "ops": "standard",
        "output": Path("there"),
        "force": True,
    }


def test_build_prints_the_manifest_on_stdout_and_the_rest_on_stderr(call: Call, compiler: ModuleType) -> None:
    outcome = call("build", "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out) == _MANIFEST
    assert outcome.err == "exporting\nnotice: weights are random\na user's module prints\n"


def test_build_prints_a_table_without_json(call: Call, compiler: ModuleType) -> None:
    lines = {line.split()[0]: line for line in call("build").out.splitlines()}
    assert lines["artifact"].endswith("artifacts/toy")
    assert lines["input"].endswith("input_ids:int64[batch,tokens<=512]")
    assert lines["quantized"].endswith("3 of 4 (left: head: too small)")
    assert lines["file"].endswith("model.onnx, 12,345 bytes")


@pytest.mark.filterwarnings("ignore:a foreign warning")
def test_debug_shows_what_is_held_back_otherwise(compiler: ModuleType, call: Call) -> None:
    assert "debug: a detail" in call("build", "--debug").err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (errors.TxExportError("refused"), 1, "error: refused"),
        (errors.LoadError("two\nlines"), 1, "error: two lines"),
        (errors.PluginError("no such pass"), 2, "error: no such pass"),
        (errors.BudgetError("pass dynamic_int8: 9 dB"), 3, "error: pass dynamic_int8: 9 dB"),
        (PermissionError(13, "Permission denied", "/there"), 1, "error: /there: Permission denied"),
        (KeyError("x"), 1, "error: unexpected KeyError: 'x'; run with --debug for the traceback"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(
    call: Call, compiler: ModuleType, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    monkeypatch.setattr(compiler, "build", _raising(error))
    assert call("build") == Outcome(code, "", line + "\n")


def test_debug_adds_the_traceback(call: Call, compiler: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "build", _raising(KeyError("x")))
    outcome = call("--debug", "build")
    assert outcome.code == 1
    assert "Traceback (most recent call last)" in outcome.err
    assert outcome.err.endswith("error: unexpected KeyError: 'x'; run with --debug for the traceback\n")


@pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("fail", 3)])
def test_compare_prints_its_report_and_exits_3_outside_the_budget(
    call: Call, compiler: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verdict: str, code: int
) -> None:
    measured = {"max_abs": 0.5, "sqnr_db": None, "cosine": 0.99, "agreement": 1.0, "non_finite": 0}
    report = {"verdict": verdict, "outputs": {"logits": measured}, "invariance": {"padding": 0.0}, "cases": []}
    monkeypatch.setattr(compiler, "compare", lambda artifact, source: report, raising=False)
    as_json = call("compare", str(tmp_path), "--json")
    assert as_json.code == code
    assert json.loads(as_json.out) == report
    assert as_json.err.startswith("error: ") == (verdict == "fail")
    assert call("compare", str(tmp_path)).out.splitlines()[1].split() == ["logits", "0.5", "-", "0.99", "1", "0"]


def test_bench_hands_over_its_lists_and_draws_the_chart(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}
    report = {"rows": [], "threads": 2}

    def bench(artifact: Path, *, progress: Callable[[str], None], **given: object) -> dict[str, Any]:
        seen.update(given, artifact=artifact)
        return report

    def chart(given: object, path: Path) -> None:
        seen.update(chart=path, charted=given)

    def table(given: object) -> Table:
        shown = Table("contender", "p50 ms")
        shown.add_row("eager " + 100 * "x", "1.25")
        return shown

    stand_in = ModuleType("tx_export.benchmark")
    for name, value in {"bench": bench, "chart": chart, "table": table}.items():
        setattr(stand_in, name, value)
    _stand_in(monkeypatch, stand_in)
    picture = tmp_path / "picture.png"
    outcome = call(
        "bench", str(tmp_path), "--batch", "1, 4", "--against", "eager", "--threads", "2", "--chart", str(picture)
    )
    assert outcome.code == 0
    assert 100 * "x" in outcome.out, "a table is not cut where it is piped"
    assert seen == {
        "artifact": tmp_path,
        "source": None,
        "batch": (1, 4),
        "tokens": (16, 128, 512),
        "against": ("eager",),
        "threads": 2,
        "chart": picture,
        "charted": report,
    }


def test_run_hands_over_its_arguments(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def run(folder: Path, texts: Sequence[str], **given: object) -> None:
        seen.append((folder, texts, given))
        print("answer")

    monkeypatch.setattr(runtime, "run", run)
    options = ("--pair", "b", "--threads", "1", "--json", "--top-k", "3", "--stop", "x", "--stop", "y")
    assert call("run", str(tmp_path), "a text", *options, "--", "--debug") == Outcome(0, "answer\n", "")
    given: dict[str, Any] = {"pairs": ("b",), "source": None, "column": None, "provider": None, "threads": 1}
    given |= {"as_json": True, "options": {"top_k": 3, "stop": ["x", "y"]}}
    assert seen == [(tmp_path, ("a text", "--debug"), given)]


def test_list_has_one_line_for_each_plugin(call: Call) -> None:
    from tx_export import plugins

    rows = [line.split(maxsplit=2) for line in call("list").out.splitlines()]
    kinds: tuple[plugins.Kind, ...] = ("model", "pass", "provider")
    assert [row[:2] for row in rows] == [[kind, name] for kind in kinds for name in plugins.names(kind)]
    assert all(len(row) == 3 for row in rows), "each with the first line of its docstring"


def test_inspect_counts_the_nodes_of_a_file(call: Call, tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>
    g (float[batch,4] x) => (float[batch,4] y) { a = Relu(x)  b = com.microsoft.QuickGelu(a)  y = Relu(b) }"""
    path = tmp_path / "toy.onnx"
    ir.save(ir.from_onnx_text(text), path)
    assert json.loads(call("inspect", str(path), "--json").out) == {
        "file": "toy.onnx",
        "bytes": path.stat().st_size,
        "ir_version": 10,
        "domains": {"": 20, "com.microsoft": 1},
        "inputs": [{"name": "x", "dtype": "float", "dims": ["batch", 4]}],
        "outputs": [{"name": "y", "dtype": "float", "dims": ["batch", 4]}],
        "nodes": {"Relu": 2, "com.microsoft::QuickGelu": 1},
    }
    assert "nodes       2 Relu" in call("inspect", str(path)).out


def test_inspect_refuses_what_is_neither_artifact_nor_graph(call: Call, tmp_path: Path) -> None:
    text = tmp_path / "text.onnx"
    text.write_text("no graph")
    assert f"error: {text}: not an ONNX file that can be read" in call("inspect", str(text)).err
    assert call("inspect", str(tmp_path)).code == 1


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    code = (
        "import sys, click\nfrom tx_export import _console\n"
        "@click.command()\ndef talk():\n    while True: click.echo('x' * 1000)\n"
        "sys.exit(_console.run(talk, []))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as talking:
        assert talking.stdout is not None and talking.stderr is not None
        talking.stdout.read(10)
        talking.stdout.close()
        assert talking.stderr.read() == b""
    assert talking.returncode == 1


def test_ctrl_c_is_one_line_and_exit_code_130() -> None:
    code = (
        "import sys, time, click\nfrom tx_export import _console\n"
        "@click.command()\ndef wait():\n    print('waiting', flush=True)\n    time.sleep(60)\n"
        "sys.exit(_console.run(wait, []))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None and waiting.stderr is not None
        waiting.stdout.readline()
        waiting.send_signal(signal.SIGINT)
        assert waiting.stderr.read() == b"error: interrupted\n"
    assert waiting.returncode == 130
