"""ONNX files made by hand: what other exporters and optimizers write, each with one trait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tx_export._onnx_output import build_onnx
from tx_export.compiler import BuildOptions

__all__ = ["ONE", "TWO", "WEIGHTS", "B", "V", "W", "X", "Y", "built", "node", "plain", "value", "weight", "write"]

Array = NDArray[Any]


def weight(name: str, *shape: int, dtype: type = np.float32) -> onnx.TensorProto:
    """Seeded numbers."""
    values = np.random.default_rng(len(name)).standard_normal(shape) * 0.3
    return numpy_helper.from_array(values.astype(dtype), name)


def value(name: str, dtype: int = TensorProto.FLOAT, shape: Sequence[int | str] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def node(op: str, inputs: str, outputs: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    """Names are separated by blanks."""
    return helper.make_node(op, inputs.split(), outputs.split(), domain=domain, **attributes)


X, Y = value("x", shape=["N", "S", 64]), value("y", shape=["N", "S", 64])
W, B, V = weight("w", 64, 64), weight("b", 64), weight("vv", 64, 64)
WEIGHTS = (W, B, V)
ONE = (node("MatMul", "x w", "y"),)
TWO = (node("MatMul", "x w", "h"), node("Add", "h b", "g"), node("Tanh", "g", "t"), node("MatMul", "t vv", "y"))


def write(
    file: Path,
    nodes: Sequence[onnx.NodeProto] = TWO,
    inputs: Sequence[onnx.ValueInfoProto] = (X,),
    outputs: Sequence[onnx.ValueInfoProto] = (Y,),
    weights: Sequence[onnx.TensorProto] = WEIGHTS,
    opset: int = 18,
    ir_version: int = 8,
    domains: Sequence[onnx.OperatorSetIdProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
) -> Path:
    """What isn't given is y = tanh(x w + b) vv of opset 18."""
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    imports = [helper.make_opsetid("", opset), *domains]
    model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version, functions=list(functions))
    onnx.save(model, file)
    return file


def built(file: Path, output: Path, quantize: str | None = "none", **changes: Any) -> tuple[Path, Mapping[str, Any]]:
    """As the commands build: with `none` as `optimize`, else as `quantize`; `changes` are further options."""
    options = BuildOptions(source=str(file), quantize=quantize, **changes)
    return build_onnx(options, output, lambda line: None)


def plain(file: Path, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """What a file gives in ONNX Runtime as it is, by names."""
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, map(np.asarray, session.run(names, dict(feeds))), strict=True))
