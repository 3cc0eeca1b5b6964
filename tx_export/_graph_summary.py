"""What an ONNX file holds, counted from its graph; weights in other files are not read, and those elsewhere refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir

from tx_export.errors import ArtifactError
from tx_export.runtime import external_files

__all__ = ["summarize"]


def summarize(path: Path) -> dict[str, Any]:
    """JSON values: file, bytes, ir_version, domains, inputs, outputs, nodes (subgraphs too, most frequent first)."""
    external_files(path)
    try:
        model = ir.load(path)
    except Exception as error:
        raise ArtifactError(f"{path}: not an ONNX file that can be read: {error}") from error
    nodes = Counter(f"{node.domain}::{node.op_type}".removeprefix("::") for node in model.graph.all_nodes())
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "ir_version": model.ir_version,
        "domains": dict(sorted(model.opset_imports.items())),
        "inputs": [_tensor(value) for value in model.graph.inputs],
        "outputs": [_tensor(value) for value in model.graph.outputs],
        "nodes": dict(sorted(nodes.items(), key=lambda item: (-item[1], item[0]))),
    }


def _tensor(value: ir.Value) -> dict[str, Any]:
    dtype = "unknown" if value.dtype is None else value.dtype.name.lower()
    dims = [] if value.shape is None else [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]
    return {"name": value.name, "dtype": dtype, "dims": dims}
