"""Write an artifact folder whole or not at all; open graphs in sessions as the artifact will."""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from tx_export import runtime
from tx_export._halves import halves, unload_weights
from tx_export.errors import ArtifactError

__all__ = ["check_target", "open_graph", "seal", "staged", "write_graph", "write_graphs"]

Runner = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]

_INLINE_BYTES = 1_800_000_000  # a protobuf message holds 2 GB
_SCRATCH = "tx-export-"  # folders for graphs that are tried; the number of the process follows
_UNSEALED = ("manifest.json", "REPORT.md")  # the list itself, and measured times


def check_target(target: Path, force: bool) -> None:
    """ArtifactError unless an artifact can be put there; called before any long work.

    An existing artifact needs `force`; a folder that isn't one is never replaced.
    """
    _sweep(target.resolve())  # a build that was killed may have left the old artifact under another name
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ArtifactError(f"{target} exists and is not a folder")
    if target.is_dir() and any(target.iterdir()):
        if not (target / "manifest.json").is_file():
            raise ArtifactError(f"{target} exists and is not an artifact of tx-export; it is left as it is")
        _listed(target)
        if not force:
            raise ArtifactError(f"{target} exists already; --force replaces it")
    parent = target.resolve().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ArtifactError(f"{parent}: can't write there: {error.strerror or error}") from error


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A new folder beside the target, renamed to it when the block ends well and removed when it doesn't.

    Files in an old target that its manifest doesn't list are kept.
    """
    target = target.resolve()
    _sweep(target)
    was_there = target.exists()
    folder = target.with_name(f".{target.name}.{os.getpid()}.new")
    with _writing(target):
        folder.mkdir()
    try:
        with _writing(target):
            yield folder
            if target.exists() and not was_there:
                raise ArtifactError(f"{target}: another build has just put an artifact there; --force replaces it")
            _replace(target, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArtifactError(f"{path}: can't be written: {error.strerror or error}") from error


def _replace(target: Path, folder: Path) -> None:
    if not target.exists():
        folder.rename(target)
        return
    ours = {*_listed(target), *_UNSEALED, *(path.name for path in folder.iterdir())} if any(target.iterdir()) else set()
    for path in target.iterdir():
        if path.name not in ours:
            _copy(path, folder / path.name)
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    target.rename(old)
    folder.rename(target)
    shutil.rmtree(old)


def _copy(source: Path, copy: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, copy, symlinks=True)
    else:
        shutil.copy2(source, copy, follow_symlinks=False)


def _sweep(target: Path) -> None:
    """Remove what builds that were killed left behind; if one was killed while it replaced, bring the old one back."""
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*-*"):
        pid = left.name.removeprefix(_SCRATCH).partition("-")[0]
        if pid.isdecimal() and not _is_alive(int(pid)) and int(pid) != os.getpid():
            shutil.rmtree(left, ignore_errors=True)
    for left in target.parent.glob(f".{glob.escape(target.name)}.*"):
        pid, _, kind = left.name.removeprefix(f".{target.name}.").partition(".")
        if not pid.isdecimal() or kind not in ("new", "old") or _is_alive(int(pid)):
            continue
        if kind == "old" and not target.exists():
            left.rename(target)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def _listed(folder: Path) -> list[str]:
    """The files that an artifact's manifest lists."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format_version"] < 1:
            raise ValueError
        return list(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{folder} exists and is not an artifact of tx-export; it is left as it is") from error


def write_graph(model: ir.Model, path: Path, inline_bytes: int = _INLINE_BYTES) -> None:
    """Write a graph; weights that are too much for one file go into `<name>.data` beside it."""
    weights = sum(
        value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None
    )
    with _writing(path):
        if weights > inline_bytes:
            ir.save(model, path, external_data=f"{path.name}.data")
        else:
            ir.external_data.load_to_model(model)  # weights of a graph that was read may lie in its own data file
            ir.save(model, path)


def write_graphs(model: ir.Model, folder: Path) -> ir.Model:
    """Write model.onnx, or encoder.onnx and decoder.onnx, and return the graph as its files have it."""
    if list(halves(model)) == ["model"]:
        write_graph(model, folder / "model.onnx")
        return ir.load(folder / "model.onnx")
    with _writing(folder):
        unload_weights(model, folder)
        for name, half in halves(model).items():
            ir.save(half, folder / f"{name}.onnx")
    return model


def open_graph(model: ir.Model, settings: Mapping[str, Any], threads: int | None = None) -> Runner:
    """A session on a graph with the settings of a provider, as a function from feeds to outputs by name.

    Feeds of float32 are rounded for inputs of half precision. Of a graph of two halves the feeds tell which one runs.
    """
    parts = halves(model)
    with (
        _writing(Path(tempfile.gettempdir())),
        tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-") as folder,
    ):
        for name, half in parts.items():
            write_graph(half, Path(folder) / f"{name}.onnx")
        try:
            runners = [
                (_input_names(half), _opened(half, Path(folder) / f"{name}.onnx", settings, threads))
                for name, half in parts.items()
            ]
        except ArtifactError as error:  # the folder is gone before anybody could look into it
            raise ArtifactError(str(error).replace(f"{folder}{os.sep}", "")) from error
    return runners[0][1] if len(runners) == 1 else functools.partial(_run_half, runners)


def _input_names(graph: ir.Model) -> frozenset[str]:
    return frozenset(str(value.name) for value in graph.graph.inputs)


def _opened(graph: ir.Model, path: Path, settings: Mapping[str, Any], threads: int | None) -> Runner:
    names = [value.name or "" for value in graph.graph.outputs]
    float16 = {value.name for value in graph.graph.inputs if value.dtype == ir.DataType.FLOAT16}
    session = runtime.open_session(path, "0", "cpu", settings, threads or runtime.available_threads())

    def run(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = {name: array.astype(np.float16) if name in float16 else array for name, array in feeds.items()}
        return dict(zip(names, session.run(names, given), strict=True))

    return run


def _run_half(
    runners: Sequence[tuple[frozenset[str], Runner]], feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Of the encoder or the decoder, whichever has all that it takes."""
    names, run = next((names, run) for names, run in runners if names <= feeds.keys())
    return run({name: feeds[name] for name in names})


def seal(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Add the list of files, with bytes and sha256, and write manifest.json."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name not in _UNSEALED:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            files[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    text = json.dumps({**manifest, "files": files}, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")
