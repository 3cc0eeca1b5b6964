"""What to know of half precision where the CPU runs it, or stands in for the provider that does.

ONNX Runtime's CPU provider has a few float16 kernels; around every other node it adds casts when it loads a graph.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx_ir as ir
import onnxruntime

from tx_export.passes import Left

__all__ = ["note_on"]


def note_on(model: ir.Model, half: str, provider: str) -> Left:
    """For manifest and report: what it costs on a CPU, or that another provider's arithmetic was emulated on one."""
    if provider != "cpu":
        return Left("verification", f"on a CPU, in float32 with every result rounded to {half} as {provider} rounds it")
    added = _casts_at_load(model)
    return Left("speed on CPUs", f"{added} casts are added at load, around float32 kernels: by those slower than fp32")


def _casts_at_load(model: ir.Model) -> int:
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
