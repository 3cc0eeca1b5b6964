"""From an ONNX file to another: the graph alone, judged as for an artifact, put in place whole or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from tx_export import runtime
from tx_export._onnx_module import OnnxModule
from tx_export.artifact import write_graph
from tx_export.compiler import BuildOptions, build
from tx_export.errors import ArtifactError

__all__ = ["check_file", "write_file"]


def check_file(target: Path, force: bool) -> None:
    """ArtifactError unless the file can be put there; called before any long work. An existing one needs `force`."""
    if target.is_dir() or (target.is_symlink() and not target.is_file()):
        raise ArtifactError(f"{target} exists and is not a file")
    for path in (target, _data(target)):
        if path.exists() and not force:
            raise ArtifactError(f"{path} exists already; --force replaces it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise ArtifactError(f"{target.parent}: can't write there: {error.strerror or error}") from error


def write_file(options: BuildOptions, target: Path, progress: Callable[[str], None]) -> Mapping[str, Any]:
    """Build, and keep nothing but the graph, with `<name>.data` beside it where it is large; returns the manifest."""
    check_file(target, options.force)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        folder = build(replace(options, output=Path(scratch) / "artifact"), progress)
        new = Path(scratch) / target.name
        write_graph(ir.load(folder / "model.onnx"), new)
        OnnxModule(new)  # as others will open it: without the session settings of an artifact
        manifest = runtime.read_manifest(folder)
        if _data(new).exists():
            target.unlink(missing_ok=True)  # it would read the new weights
            _data(new).replace(_data(target))
        new.replace(target)
    return manifest


def _data(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")
