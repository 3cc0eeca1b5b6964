"""Files, paths and interrupted builds."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
import pytest

from tx_export import cli, compiler
from tx_export.artifact import seal, write_graphs
from tx_export.compiler import BuildOptions, build
from tx_export.errors import ArtifactError
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.runtime import read_manifest

from .conftest import Once
from .models import save_cls

_TINY = {"d_model": 16, "num_heads": 2, "d_ff": 32, "num_layers": 1, "max_length": 32}


@pytest.fixture(scope="module")
def weights(once: Once) -> Path:
    """Of a classifier so small that a build without the exporter takes no time."""
    return once("tiny-weights", lambda folder: save_cls(folder, **_TINY)) / "model.safetensors"


@pytest.fixture(scope="module")
def graph(once: Once, weights: Path) -> Path:
    """Its graph, as exported."""

    def make(folder: Path) -> None:
        folder.mkdir()
        exported = export(load("classifier", weights=str(weights)), Target.parse(None, "fused"))
        ir.save(exported, folder / "model.onnx")

    return once("tiny-graph", make) / "model.onnx"


@pytest.fixture
def options(graph: Path, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BuildOptions]:
    """A build into `tmp_path / "a"` that takes one export with all others."""
    monkeypatch.setattr(compiler, "export", lambda model, target: ir.load(graph))
    yield BuildOptions("classifier", weights=str(weights), quantize="none", output=tmp_path / "a")


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


_NAMES = [
    "a bär 'изба' 漢字",
    'quote"d',
    "100%s {x} $HOME",
    "new\nline",
    "-dash",
    "ends.onnx",
    "tr\u00e9s\u0301 \U0001f600",
]


@pytest.mark.parametrize("name", _NAMES)
def test_b235_any_name_of_a_folder_will_do(
    name: str, options: BuildOptions, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / name
    copied = shutil.copytree(weights.parent, folder / name)
    given = ["build", "classifier", "--weights", str(copied / "model.safetensors"), "--quantize", "none"]
    artifact = str(folder / f"out {name}")
    for command in (
        [*given, "-o", artifact],
        [*given, "-o", artifact, "--force"],
        ["run", artifact, "hello"],
        ["compare", artifact, "--source", str(copied / "model.safetensors")],
        ["inspect", artifact],
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == 0, capsys.readouterr().err
    manifest = (Path(artifact) / "manifest.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in manifest and "../" not in manifest


def test_b235_an_artifact_of_such_a_name_is_benched_and_tests_itself(cls_artifact: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(cls_artifact, tmp_path / _NAMES[0])
    for given in (["--self-test"], ["--bench", "--batch", "1", "--tokens", "2"]):
        done = subprocess.run([sys.executable, str(folder / "run.py"), *given], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    bench = [sys.executable, "-m", "tx_export", "bench", str(folder), "--batch", "1", "--tokens", "2", "--json"]
    done = subprocess.run([*bench, "--against", ""], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


# One process imports everything once; each build is a child of it that dies where it is told to.
_KILLED = """
import json, os, resource, signal, sys
from pathlib import Path
import onnx_ir as ir
from tx_export import artifact, cli, compiler, runtime
from tx_export.quantize.dynamic_int8 import DynamicInt8

graph, weights, target, *force = sys.argv[1:]

def ending(how):
    def end(*_arguments, **_options):
        os.kill(os.getpid(), getattr(signal, how))
    return end

def half(how, path):
    path.write_bytes(b"half of it")
    ending(how)()

def build(point, how):
    compiler.export = lambda model, asked: ir.load(graph)
    write, run = compiler.write_graphs, DynamicInt8.call
    if point == "start":
        compiler.load = ending(how)
    elif point == "after export":
        compiler.export = ending(how)
    elif point == "while a graph is tried":
        artifact.write_graph = lambda model, path: half(how, path)
    elif point == "while quantizing":
        DynamicInt8.call = ending(how)
    elif point == "while saving":
        compiler.write_graphs = lambda model, folder: half(how, Path(folder) / "model.onnx")
    elif point == "before the end":
        runtime.self_test = ending(how)
    elif point == "disk full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    passes = ["--passes", "dynamic_int8{min_elements=1}"] if point == "while quantizing" else ["--quantize", "none"]
    options = [*passes, "-o", target, *force]
    cli.main(["build", "classifier", "--weights", weights, *options])

def files():
    found = sorted(Path(target).rglob("*"))
    return {str(path): path.read_bytes().hex() for path in found if path.is_file()}

os.environ["TMPDIR"] = str(Path(target).parent / "temporary")
found = {}
for line in sys.stdin:
    point, how = line.strip().split("/")
    child = os.fork()
    if child == 0:
        build(point, how)
    status = os.waitpid(child, 0)[1]
    found[line.strip()] = [os.waitstatus_to_exitcode(status), files()]
print(json.dumps(found))
"""
_POINTS = ("start", "after export", "while a graph is tried", "while quantizing", "while saving", "before the end")
_ENDS = {
    False: [*(f"{point}/SIGKILL" for point in _POINTS), "while a graph is tried/SIGINT", "while saving/SIGINT"],
    True: ["while saving/SIGKILL", "before the end/SIGKILL", "before the end/SIGINT"],
}  # fmt: skip


@pytest.mark.parametrize("force", [False, True])
def test_b236_a_build_that_is_ended_leaves_the_old_artifact_or_none_and_the_next_one_cleans_up(
    force: bool, options: BuildOptions, graph: Path, weights: Path, tmp_path: Path
) -> None:
    """SIGKILL and Ctrl-C at each point, and a disk that is full."""
    target = tmp_path / "new" / "a"
    (tmp_path / "new" / "temporary").mkdir(parents=True)
    if force:
        build(BuildOptions("classifier", weights=str(weights), quantize="none", output=target))
    before = {str(target / name): content.hex() for name, content in _files(target).items()}
    lines = [*_ENDS[force], "disk full/", "no more/"]
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(graph), str(weights), str(target), *(["--force"] if force else [])],
        input="\n".join(lines), capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    codes = {"SIGKILL": -signal.SIGKILL, "SIGINT": 130, "": 1}
    for line in lines[:-1]:
        assert found[line][0] == codes[line.partition("/")[2]], (line, done.stderr)
        assert found[line][1] == before, line
    assert found["no more/"][0] == 0, done.stderr
    assert f"{tmp_path / 'new'}" in next(line for line in done.stderr.splitlines() if "can't be written" in line)
    assert sorted(read_manifest(target)["files"]) == sorted({*_files(target)} - {"manifest.json", "REPORT.md"})
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"a", "temporary"}
    assert not list((tmp_path / "new" / "temporary").glob("tx-export-*"))


def test_b236_an_artifact_that_is_not_there_is_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["run", str(tmp_path / "a"), "x"], ["inspect", str(tmp_path / "a")]):
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code != 0
        assert str(tmp_path / "a") in capsys.readouterr().err.splitlines()[-1]


def _without_privilege() -> None:
    """Root may write anywhere; without this capability it is held to the permissions like everybody."""
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE


def test_b238_an_artifact_that_can_not_be_written_to_is_run_tested_and_timed(
    cls_artifact: Path, tmp_path: Path
) -> None:
    folder, home = shutil.copytree(cls_artifact, tmp_path / "a"), tmp_path / "home"
    home.mkdir()
    before = _files(folder)
    for path in (folder, home, *folder.iterdir()):
        path.chmod(0o555)
    try:
        for given in (["hello"], ["--self-test"], ["--bench", "--batch", "1", "--tokens", "2"]):
            done = subprocess.run(
                [sys.executable, str(folder / "run.py"), *given],
                cwd=folder, env={"HOME": str(home), "TMPDIR": str(home)}, preexec_fn=_without_privilege,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
        assert _files(folder) == before and not list(home.iterdir())
    finally:
        for path in (folder, home):
            path.chmod(0o755)


def test_b238_a_build_into_a_folder_that_can_not_be_written_to_is_refused_before_the_export(tmp_path: Path) -> None:
    """Before the model is loaded, even: what takes time is what is imported for that."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o555)
    command = [sys.executable, "-X", "importtime", "-m", "tx_export", "build", "-o", str(tmp_path / "home" / "a")]
    done = subprocess.run(command, preexec_fn=_without_privilege, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, len(lines)) == (1, 1)
    assert lines[0].startswith(f"error: {tmp_path / 'home'}: can't write there: ")
    assert " torch\n" not in done.stderr.replace("|", "")


def test_b239_files_of_others_stay_and_stale_ones_of_ours_go(options: BuildOptions, tmp_path: Path) -> None:
    folder = build(options)
    (folder / "notes.txt").write_text("mine")
    (folder / "model.onnx.data").write_bytes(b"of an older build")
    seal(folder, json.loads((folder / "manifest.json").read_text()))
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["notes.txt"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    before = _files(folder)
    with pytest.raises(ArtifactError, match="exists already; --force replaces it"):
        build(options)
    assert _files(folder) == before
    build(_forced(options))
    after = _files(folder)
    assert set(before) - set(after) == {"model.onnx.data"} and after["notes.txt"] == b"mine"
    assert read_manifest(folder)


def _forced(options: BuildOptions) -> BuildOptions:
    return BuildOptions(**{**options.__dict__, "force": True})


def test_two_builds_into_one_target_at_once_leave_one_whole_artifact_and_one_error(
    options: BuildOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second finds the target taken, whenever it gets there."""
    again = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write = write_graphs

    def beaten(model: ir.Model, path: Path) -> ir.Model:
        monkeypatch.setattr(compiler, "write_graphs", write)
        monkeypatch.setattr(os, "getpid", lambda: again.pid)  # the other build is another process
        build(options)
        monkeypatch.undo()
        return write(model, path)

    monkeypatch.setattr(compiler, "write_graphs", beaten)
    with pytest.raises(ArtifactError, match="another build has just put an artifact there; --force replaces it"):
        build(options)
    again.communicate(b"\n")
    assert read_manifest(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
