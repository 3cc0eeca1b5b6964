"""An artifact folder is written whole or not at all, and replaces only what is ours."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from tx_export import artifact
from tx_export.artifact import check_target, open_graph, seal, staged, write_graph
from tx_export.errors import ArtifactError
from tx_export.providers.cpu import Cpu
from tx_export.testing import graph_from_text, matmul_model, run_graph

Array = NDArray[Any]


def build(target: Path, **files: str) -> None:
    """A stand-in for a build: files by stem, and the list of them."""
    with staged(target) as folder:
        for name, text in files.items():
            (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        seal(folder, {"format_version": 1})


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, hidden ones too, by its path; links by what they point to."""
    return {
        str(path.relative_to(folder)): f"-> {path.readlink()}"
        if path.is_symlink()
        else path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


class Interrupted(BaseException):
    """Stands for Ctrl-C: no Exception."""


@pytest.mark.parametrize("raised", [RuntimeError, Interrupted, KeyboardInterrupt])
@pytest.mark.parametrize("old", [True, False])
def test_what_is_raised_inside_leaves_the_old_artifact_or_none(
    raised: type[BaseException], old: bool, tmp_path: Path
) -> None:
    target = tmp_path / "a"
    if old:
        build(target, model="old")
    before = tree(tmp_path)
    with pytest.raises(raised), staged(target) as folder:
        (folder / "model.txt").write_text("half of the new", encoding="utf-8")
        raise raised
    assert tree(tmp_path) == before
    assert target.exists() == old
    assert hidden(tmp_path) == []


_KILLED = {
    "before anything is written": "staged_folder",
    "while writing": "written",
    "between the two renames": "renamed",
    "before the old one is removed": "replaced",
}
_PROGRAM = """
import os, signal, sys
from pathlib import Path
from tx_export import artifact

target, point = Path(sys.argv[1]), sys.argv[2]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

rename, count = Path.rename, 0

def dying_rename(path, other):
    global count
    count += 1
    if point == "renamed" and count == 2:
        die()
    done = rename(path, other)
    if point == "replaced" and count == 2:
        die()
    return done

Path.rename = dying_rename
with artifact.staged(target) as folder:
    if point == "staged_folder":
        die()
    (folder / "model.txt").write_text("new")
    if point == "written":
        die()
    artifact.seal(folder, {"format_version": 1})
"""


@pytest.mark.parametrize(
    ("point", "old"),
    [*((point, True) for point in _KILLED), ("before anything is written", False), ("while writing", False)],
)
def test_a_killed_build_leaves_a_whole_artifact_or_none_and_the_next_one_sweeps(
    point: str, old: bool, tmp_path: Path
) -> None:
    target = tmp_path / "a"
    if old:
        build(target, model="old")
        (target / "notes.txt").write_text("mine", encoding="utf-8")
    before = tree(target)
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(target), _KILLED[point]], check=False)
    assert done.returncode == -signal.SIGKILL
    assert hidden(tmp_path) != []
    whole = tree(target)
    expected = {"replaced": "new", "renamed": None}.get(_KILLED[point], "old" if old else None)
    assert whole.get("model.txt") == expected
    if old:  # the next build is asked first, and finds the old one again if it was moved away
        with pytest.raises(ArtifactError, match="exists already; --force replaces it"):
            check_target(target, force=False)
        assert tree(target) == (whole if expected == "new" else before)
        check_target(target, force=True)
    build(target, model="next")
    assert tree(target)["model.txt"] == "next"
    assert tree(target).get("notes.txt") == ("mine" if old else None)
    assert hidden(tmp_path) == []


def test_leftovers_of_other_targets_and_of_running_builds_are_not_swept(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
        dead = int(gone.stdout)
        kept = [f".a.{running.pid}.new", f".ab.{dead}.new", ".a.b.new", f".a.{dead}.other", f".a.{dead}"]
        for name in [*kept, f".a.{dead}.new"]:
            (tmp_path / name).mkdir()
        build(tmp_path / "a", model="new")
        assert hidden(tmp_path) == sorted(kept)
        running.communicate(b"\n")


def test_leftovers_are_found_where_the_name_holds_the_signs_of_a_pattern(tmp_path: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (tmp_path / f".a[1]*.{int(gone.stdout)}.new").mkdir()
    build(tmp_path / "a[1]*", model="new")
    assert hidden(tmp_path) == []


def test_an_existing_artifact_without_force_is_refused_and_unchanged(tmp_path: Path) -> None:
    build(tmp_path / "a", model="old")
    before = tree(tmp_path)
    with pytest.raises(ArtifactError, match=r"/a exists already; --force replaces it$"):
        check_target(tmp_path / "a", force=False)
    assert tree(tmp_path) == before
    check_target(tmp_path / "a", force=True)
    assert tree(tmp_path) == before


def test_with_force_foreign_files_are_kept_and_files_of_the_old_artifact_are_gone(tmp_path: Path) -> None:
    target = tmp_path / "a"
    build(target, model="old", second="stale")
    (target / "REPORT.md").write_text("old times", encoding="utf-8")
    (target / "notes.txt").write_text("mine", encoding="utf-8")
    (target / "mine" / "deep").mkdir(parents=True)
    (target / "mine" / "deep" / "one.txt").write_text("1", encoding="utf-8")
    (target / "mine" / "deep" / "two.txt").symlink_to("one.txt")
    (target / "link.txt").symlink_to("notes.txt")
    (target / "broken").symlink_to("nowhere")
    (target / "linked").symlink_to("mine")
    build(target, model="new")
    found = tree(target)
    manifest = json.loads(found.pop("manifest.json"))
    assert found == {
        "model.txt": "new",
        "notes.txt": "mine",
        "mine/deep/one.txt": "1",
        "mine/deep/two.txt": "-> one.txt",
        "link.txt": "-> notes.txt",
        "broken": "-> nowhere",
        "linked": "-> mine",
    }
    assert list(manifest["files"]) == ["model.txt"]
    assert hidden(tmp_path) == []


_FOREIGN: dict[str, Callable[[Path], object]] = {
    "some files": lambda folder: (folder / "notes.txt").write_text("mine"),
    "a manifest of somebody else": lambda folder: (folder / "manifest.json").write_text('{"name": "web app"}'),
    "a manifest that is a list": lambda folder: (folder / "manifest.json").write_text("[1]"),
    "a manifest that is no JSON": lambda folder: (folder / "manifest.json").write_text("{"),
    "a manifest with a bad version": lambda folder: (folder / "manifest.json").write_text(
        '{"format_version": "1", "files": {}}'
    ),
    "a manifest without files": lambda folder: (folder / "manifest.json").write_text('{"format_version": 1}'),
    "a folder named so": lambda folder: (folder / "manifest.json").mkdir(),
}


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("kind", _FOREIGN)
def test_a_folder_that_is_not_ours_is_never_replaced(kind: str, force: bool, tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.mkdir()
    _FOREIGN[kind](target)
    before = tree(tmp_path)
    with pytest.raises(ArtifactError, match=r"/a exists and is not an artifact of tx-export; it is left as it is$"):
        check_target(target, force)
    assert tree(tmp_path) == before


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    check_target(tmp_path / "a", force=False)
    build(tmp_path / "a", model="new")
    assert tree(tmp_path / "a")["model.txt"] == "new"
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("kind", ["a link to an artifact", "a link to nothing", "a file"])
def test_a_target_that_is_no_folder_is_refused(kind: str, force: bool, tmp_path: Path) -> None:
    build(tmp_path / "real", model="old")
    target = tmp_path / "a"
    if kind == "a file":
        target.write_text("mine", encoding="utf-8")
    else:
        target.symlink_to("real" if kind == "a link to an artifact" else "nowhere")
    before = tree(tmp_path)
    with pytest.raises(ArtifactError, match=r"/a exists and is not a folder$"):
        check_target(target, force)
    assert tree(tmp_path) == before


def test_a_parent_that_is_missing_is_made_and_a_link_to_it_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real").mkdir()
    target = tmp_path / "link" / "deep" / "a"
    check_target(target, force=False)
    build(target, model="new")
    assert tree(tmp_path / "real" / "deep" / "a")["model.txt"] == "new"


def test_a_target_that_cannot_be_written_is_refused_before_any_work_with_the_folder_in_the_message(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    # Under a file, and in a file system that takes no files from anybody: root too.
    for parent in (tmp_path / "file", tmp_path / "file" / "deeper", Path("/proc/sys"), Path("/proc/sys/new")):
        with pytest.raises(ArtifactError, match=rf"^{parent}: can't write there: "):
            check_target(parent / "a", force=False)
    assert tree(tmp_path) == {"file": "mine"}


def test_a_folder_that_cannot_be_written_any_more_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"/file/a: can't be written: "), staged(tmp_path / "file" / "a"):
        pass


def test_a_full_disk_while_writing_is_an_error_of_ours_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"/a: can't be written: No space left on device$"), staged(tmp_path / "a"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_permissions_of_the_folder_follow_the_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        build(tmp_path / "a", model="new")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o777 & ~mask
    assert (tmp_path / "a" / "model.txt").stat().st_mode & 0o777 == 0o666 & ~mask


def test_two_seals_give_the_same_bytes_whenever_and_wherever_they_are_made(tmp_path: Path) -> None:
    texts = []
    for name, seconds in (("one", 0), ("two", 10**9)):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("b.txt", "a.txt", "REPORT.md") if seconds else ("REPORT.md", "a.txt", "b.txt"):
            (folder / file).write_text(file if file != "REPORT.md" else name, encoding="utf-8")
            os.utime(folder / file, (seconds, seconds))
        seal(folder, {"format_version": 1, "name": "größe"})
        seal(folder, {"format_version": 1, "name": "größe"})
        texts.append((folder / "manifest.json").read_bytes())
    assert texts[0] == texts[1]
    manifest = json.loads(texts[0])
    assert list(manifest["files"]) == ["a.txt", "b.txt"]
    # sha256 of the five letters "a.txt", computed with another tool.
    assert manifest["files"]["a.txt"] == {"bytes": 5, "sha256": _SHA}
    assert "größe" in texts[0].decode()


_SHA = "18b7cb099a9ea3f50ba899b5ba81e0d377a5f3b16f8f6eeb8b3e58cd4692b993"


def test_a_number_that_json_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        seal(tmp_path, {"x": float("nan")})


def weights_graph(seed: int = 0) -> tuple[ir.Model, Array]:
    weight = np.random.default_rng(seed).normal(size=(64, 48)).astype(np.float32)
    return matmul_model(weight), weight


def run_file(path: Path, x: Array) -> Array:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    y: Array = session.run(None, {"x": x})[0]
    return y


def test_small_weights_stand_in_the_graph_and_large_ones_in_a_file_beside_it(tmp_path: Path) -> None:
    model, weight = weights_graph()
    write_graph(model, tmp_path / "model.onnx", inline_bytes=weight.nbytes)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    write_graph(model, tmp_path / "model.onnx", inline_bytes=weight.nbytes - 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]


def test_the_data_file_is_named_without_a_folder_and_every_byte_of_it_belongs_to_a_tensor(tmp_path: Path) -> None:
    model = graph_from_text(
        """
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[n, 30] x) => (float[n, 50] y) <float[1] a = {0}, float[1] b = {0}> {
            h = MatMul (x, a)
            y = MatMul (h, b)
        }
        """
    )
    for name, shape in (("a", (30, 40)), ("b", (40, 50))):
        array = np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
        model.graph.initializers[name].const_value = ir.tensor(array, name=name)
        model.graph.initializers[name].shape = ir.Shape(shape)
    write_graph(model, tmp_path / "model.onnx", inline_bytes=1000)
    proto = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    entries = [{entry.key: entry.value for entry in tensor.external_data} for tensor in proto.graph.initializer]
    assert [entry["location"] for entry in entries] == ["model.onnx.data"] * 2
    spans = sorted((int(entry["offset"]), int(entry["length"])) for entry in entries)
    end = 0
    for offset, length in spans:
        assert end <= offset < end + 64 * 1024  # at most one page of alignment between them
        end = offset + length
    assert sum(length for _, length in spans) == 4 * (30 * 40 + 40 * 50)
    assert (tmp_path / "model.onnx.data").stat().st_size == end


def test_writing_three_times_gives_the_same_bytes(tmp_path: Path) -> None:
    model, _ = weights_graph()
    written = []
    for _ in range(3):
        write_graph(model, tmp_path / "model.onnx", inline_bytes=1000)
        written.append([(tmp_path / name).read_bytes() for name in ("model.onnx", "model.onnx.data")])
    assert written[0] == written[1] == written[2]


def test_a_graph_that_was_read_from_a_file_may_be_written_over_it(tmp_path: Path) -> None:
    model, weight = weights_graph()
    write_graph(model, tmp_path / "model.onnx", inline_bytes=1000)
    before = (tmp_path / "model.onnx.data").read_bytes()
    read = ir.load(tmp_path / "model.onnx")
    write_graph(read, tmp_path / "model.onnx", inline_bytes=1000)
    assert (tmp_path / "model.onnx.data").read_bytes() == before
    x = np.ones((1, 64), np.float32)
    assert np.array_equal(run_file(tmp_path / "model.onnx", x), run_graph(matmul_model(weight), {"x": x})["y"])


def test_a_graph_that_was_read_may_be_written_elsewhere_with_its_weights_inside(tmp_path: Path) -> None:
    model, _ = weights_graph()
    write_graph(model, tmp_path / "model.onnx", inline_bytes=1000)
    read = ir.load(tmp_path / "model.onnx")
    (tmp_path / "other").mkdir()
    write_graph(read, tmp_path / "other" / "model.onnx")
    x = np.ones((1, 64), np.float32)
    expected = run_graph(model, {"x": x})["y"]
    assert np.array_equal(
        open_graph(ir.load(tmp_path / "model.onnx"), Cpu().session(), threads=1)({"x": x})["y"], expected
    )
    (tmp_path / "model.onnx.data").unlink()
    assert np.array_equal(run_file(tmp_path / "other" / "model.onnx", x), expected)


def test_the_model_in_memory_is_the_same_after_it_was_written(tmp_path: Path) -> None:
    model, weight = weights_graph()
    write_graph(model, tmp_path / "model.onnx", inline_bytes=1000)
    (tmp_path / "model.onnx.data").unlink()
    stored = model.graph.initializers["weight"].const_value
    assert stored is not None and np.array_equal(stored.numpy(), weight)


def test_a_folder_with_a_data_file_may_be_moved_and_run_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = weights_graph()
    (tmp_path / "built").mkdir()
    write_graph(model, tmp_path / "built" / "model.onnx", inline_bytes=1000)
    (tmp_path / "built").rename(tmp_path / "moved")
    x = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    expected = run_graph(model, {"x": x})["y"]
    monkeypatch.chdir("/")
    assert np.array_equal(run_file(tmp_path / "moved" / "model.onnx", x), expected)
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(run_file(Path("moved/model.onnx"), x), expected)
    assert str(tmp_path).encode() not in (tmp_path / "moved" / "model.onnx").read_bytes()


@pytest.mark.parametrize("inline_bytes", [1000, 1 << 30])
def test_an_opened_graph_gives_what_a_plain_session_gives(inline_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "write_graph", functools.partial(write_graph, inline_bytes=inline_bytes))
    model, _ = weights_graph()
    x = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    found = open_graph(model, Cpu().session(), threads=1)({"x": x})
    assert list(found) == ["y"]
    assert np.array_equal(found["y"], run_graph(model, {"x": x})["y"])


def test_a_graph_that_does_not_load_is_an_error_of_ours() -> None:
    model = graph_from_text(
        '<ir_version: 8, opset_import: ["" : 18, "nobody" : 1]> g (float[n] x) => (float[n] y) { y = nobody.Thing (x) }'
    )
    with pytest.raises(ArtifactError, match=r"model\.onnx: onnxruntime [0-9.]+ can't load it with provider cpu"):
        open_graph(model, Cpu().session(), threads=1)
