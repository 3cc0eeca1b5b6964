"""What an ONNX file is built into: an artifact, or another file.

A file is judged as an artifact is, and put in place whole or not at all.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from tx_export import runtime
from tx_export._onnx_graph import read_graph
from tx_export._onnx_module import OnnxModule
from tx_export.artifact import write_graph
from tx_export.compiler import BuildOptions, build
from tx_export.errors import ArtifactError, PassError

__all__ = ["build_onnx"]


_log = logging.getLogger("tx_export")
_WEIGHED = ("Attention", "Gather", "Gemm", "MatMul")
_QUANTIZED = re.compile(
    "MatMulInteger.*|ConvInteger|Q(Linear|Attention|Gemm).*|DequantizeLinear|DynamicQuantize.+|.*NBits"
)


def build_onnx(
    options: BuildOptions, output: Path | None, progress: Callable[[str], None]
) -> tuple[Path, Mapping[str, Any]]:
    """Build what `output` names: an artifact folder, or the graph alone for NEW.onnx; its path and its manifest.

    Raises PassError where something is to be quantized and there is nothing, other errors as `build` does.
    """
    if options.passes is None and options.quantize != "none":
        _check_products(Path(options.source or ""))
    if output is not None and output.suffix == ".onnx":
        path, manifest = output, _write_file(options, output, progress)
    else:
        path = build(replace(options, output=output), progress)
        manifest = runtime.read_manifest(path)
    if not manifest["pipeline"]:
        _log.warning("%s: no pass had anything to change in it", options.source)
    return path, manifest


def _check_products(path: Path) -> None:
    """PassError for a file in which no weight is left to quantize."""
    graph = read_graph(path).graph
    weighed = [node for node in graph.all_nodes() if node.op_type in _WEIGHED]
    if any(_is_weight(value) for node in weighed for value in node.inputs):
        return
    counts = Counter(node.op_type for node in graph.all_nodes() if _QUANTIZED.fullmatch(node.op_type))
    found = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    already = f"; it is quantized already: {found}" if found else ""
    raise PassError(f"{path}: no product in it has a weight of its own, so there is nothing to quantize{already}")


def _is_weight(value: ir.Value | None) -> bool:
    """Whether a value is a constant matrix of floats, maybe laid out otherwise."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type in ("Cast", "Identity", "Transpose"):
        return _is_weight(node.inputs[0])
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return tensor is not None and len(tensor.shape) == 2 and tensor.dtype.is_floating_point()


def _check_target(target: Path, force: bool) -> None:
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


def _write_file(options: BuildOptions, target: Path, progress: Callable[[str], None]) -> Mapping[str, Any]:
    """Build, and keep nothing but the graph, with `<name>.data` beside it where it is large; returns the manifest."""
    _check_target(target, options.force)
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
    return {**manifest, "files": {target.name: {"bytes": target.stat().st_size}}}


def _data(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")
