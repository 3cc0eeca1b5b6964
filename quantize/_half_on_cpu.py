"""What ONNX Runtime's CPU provider makes of float16: a few kernels, and casts around every node that has none."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx_ir as ir
import onnxruntime

__all__ = ["casts_at_load"]


def casts_at_load(model: ir.Model) -> int:
    """How many casts it adds when the graph is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        given, loaded = Path(folder) / "given.onnx", Path(folder) / "loaded.onnx"
        ir.save(model.clone(), given, external_data="given.data")
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.optimized_model_filepath = str(loaded)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "loaded.data")
        onnxruntime.InferenceSession(str(given), options, providers=["CPUExecutionProvider"])
        return _casts(ir.load(loaded)) - _casts(model)


def _casts(model: ir.Model) -> int:
    return sum(node.op_type == "Cast" for node in model.graph.all_nodes())
