"""The command line with the library behind it: a real build, what refuses one, and what kills one."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tx_export import cli

# Small enough that only the exporter costs time; weights this small are left in fp32.
_TINY = "classifier --weights random:1 --set num_layers=1 --set d_model=16 --set num_heads=2 --set d_ff=32"
_TINY += " --set vocab_size=50 --set max_length=32 --quantize none"

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs the command line in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return run


def _error(err: str) -> str:
    """The last line on stderr, which must be the only error."""
    lines = err.splitlines()
    assert [line.startswith("error: ") for line in lines] == [False] * (len(lines) - 1) + [True], err
    return lines[-1]


def test_a_build_prints_the_manifest_that_it_wrote_and_its_self_test_passes(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    code, out, _ = call("build", *_TINY.split(), "--output", str(folder), "--json")
    assert code == 0
    assert json.loads(out) == json.loads((folder / "manifest.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"], "nothing else is left"
    done = subprocess.run([sys.executable, str(folder / "run.py"), "--self-test"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_was_trained_can_be_built_and_run(call: Call, tmp_path: Path) -> None:
    examples, weights, folder = tmp_path / "examples.tsv", tmp_path / "weights", tmp_path / "artifact"
    examples.write_text("ham\tdinner at eight\nspam\twin a prize now\n" * 20)
    code, out, err = call("train", "classifier", "--data", str(examples), "--epochs", "1", "-o", str(weights))
    assert code == 0
    assert out.splitlines()[0].split() == ["weights", str(weights)]
    assert err.startswith("epoch 1, step ")
    given = ["--weights", str(weights / "model.safetensors"), "--quantize", "none", "-o", str(folder)]
    assert call("build", "classifier", *given)[0] == 0
    code, out, _ = call("run", str(folder), "win a prize now", "dinner at eight", "--json")
    assert code == 0
    assert [set(json.loads(line)["scores"]) for line in out.splitlines()] == [{"ham", "spam"}] * 2


def test_the_small_classifier_compares_within_its_budget(call: Call, small_artifact: Path) -> None:
    code, out, _ = call("compare", str(small_artifact), "--json")
    assert (code, json.loads(out)["verdict"]) == (0, "pass")


def test_a_manifest_that_lacks_its_source_is_an_error_that_says_so(
    call: Call, small_artifact: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(small_artifact, tmp_path / "copy")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["source"], manifest["pipeline"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    code, _, err = call("compare", str(folder))
    assert (code, err) == (1, "error: manifest.json has no source, pipeline; its source can't be found again without\n")


def test_inspect_shows_an_artifact_and_its_graph(call: Call, small_artifact: Path) -> None:
    code, out, err = call("inspect", str(small_artifact), "--json")
    assert (code, err) == (0, "")
    manifest = json.loads(out)
    rows = [line.split(maxsplit=1) for line in call("inspect", str(small_artifact))[1].splitlines()]
    assert ["fused", f"{manifest['fused']['done']} of {manifest['fused']['of']}"] in rows
    nodes = json.loads(call("inspect", str(small_artifact / "model.onnx"), "--json")[1])["nodes"]
    assert sum(nodes.values()) == sum(domain["nodes"] for domain in manifest["domains"].values())


def test_a_budget_that_can_t_be_met_names_the_pass_and_leaves_no_artifact(call: Call, tmp_path: Path) -> None:
    # 8 bits can't come near 200 dB: even fp32 ends near 150.
    given = [*_TINY.split(), "--quantize", "dynamic_int8{min_elements=1}", "--budget", "sqnr_db=200"]
    code, out, err = call("build", *given, "-o", str(tmp_path / "tiny"))
    assert (code, out) == (3, "")
    assert "dynamic_int8" in _error(err) and "sqnr_db" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--set num_heads=3", 1, "d_model 128 does not divide by num_heads 3"),
        ("--set heads=3", 2, "heads"),
        ("--quantize int7", 2, "unknown pass 'int7'; known: "),
        ("--quantize dynamic_int8{bits=7}", 2, "unknown option 'bits=7'; known: "),
        ("--provider tpu", 2, "unknown provider 'tpu'; known: cpu, cuda"),
        ("--weights missing.safetensors", 1, "missing.safetensors"),
        ("no/such/checkpoint", 2, "no/such/checkpoint"),
        ("--budget sqnr=20", 2, "sqnr"),
    ],
)
def test_what_can_t_be_built_is_refused_before_the_export(
    call: Call, tmp_path: Path, arguments: str, code: int, message: str
) -> None:
    ended, out, err = call("build", *arguments.split(), "-o", str(tmp_path / "new"))
    assert (ended, out) == (code, "")
    assert message in _error(err)
    assert "export\n" not in err
    assert not list(tmp_path.iterdir())


def test_an_existing_target_stays_as_it_is_without_force(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for force in ([], ["--force"]):  # a folder that isn't an artifact is not replaced at all
        code, _, err = call("build", *_TINY.split(), "-o", str(tmp_path), *force)
        assert code in (1, 2)
        assert str(tmp_path) in _error(err)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_target_that_can_t_be_written_is_one_error(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    code, _, err = call("build", *_TINY.split(), "-o", str(tmp_path / "file" / "new"))
    assert code in (1, 2)
    assert "file" in _error(err)


@pytest.mark.parametrize(
    ("ending", "code", "last"), [(signal.SIGINT, 130, "error: interrupted"), (signal.SIGKILL, -9, "export")]
)
def test_a_build_that_is_ended_leaves_nothing_under_the_final_name(
    tmp_path: Path, ending: signal.Signals, code: int, last: str
) -> None:
    command = [sys.executable, "-m", "tx_export", "build", *_TINY.split(), "-o", str(tmp_path / "tiny")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as building:
        assert building.stdout is not None and building.stderr is not None
        lines = []
        for line in building.stderr:
            lines.append(line.strip())
            if lines[-1] == "export":
                time.sleep(0.5)  # into the exporter
                building.send_signal(ending)
        assert building.stdout.read() == ""
    assert (building.returncode, lines[-1]) == (code, last)
    assert not (tmp_path / "tiny").exists()
