"""An ONNX file from elsewhere: the file itself, in ONNX Runtime, is the reference.

Its graph tells what it takes; what it gives, and how long its inputs may be, is found by running it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from tx_export._load_text import bounded, read_text
from tx_export._load_weights import read_json
from tx_export._onnx_graph import read_graph
from tx_export._onnx_inputs import compared_id, declared_inputs, with_tables
from tx_export._onnx_module import OnnxModule, file_hash
from tx_export._onnx_runs import fitting, measured, outputs_of
from tx_export.errors import LoadError, PluginError
from tx_export.spec import Dim, EagerModel, TensorSpec, TextSpec

__all__ = ["load_onnx"]

_log = logging.getLogger("tx_export")
_TASK = "feature-extraction"
_TEXT = ("input_ids", "attention_mask", "token_type_ids")


def load_onnx(
    path: Path,
    *,
    inputs: Sequence[str],
    weights: Path | int | None,
    task: str | None,
    tokenizer: str | None,
    max_length: int | None,
    source: str,
) -> EagerModel:
    """`inputs` are text forms that replace what the file says; a tokenizer.json is looked for beside the file."""
    if weights is not None:
        raise PluginError(f"{source} has its own weights; --weights is not for an ONNX file")
    if task not in (None, _TASK):
        raise PluginError(f"task {task!r}: an ONNX file takes and gives arrays; its task is {_TASK} only")
    module = OnnxModule(path).eval()
    graph = read_graph(path).graph
    specs = fitting(module, with_tables(graph, declared_inputs(path, graph, inputs)))
    specs = measured(module, bounded(specs, max_length))
    return EagerModel(
        name=re.sub(r"[^\w.-]", "_", path.stem),
        source=source,
        family="onnx",
        task=_TASK,
        module=module,
        inputs=specs,
        outputs=outputs_of(module, specs),
        config={},
        weights=f"file {file_hash(path)}",
        text=_text(path, tokenizer, specs, max_length),
        padding="right",
        pad_id=compared_id(graph, specs),
    )


def _text(path: Path, tokenizer: str | None, specs: tuple[TensorSpec, ...], max_length: int | None) -> TextSpec | None:
    """By the tokenizer.json that was given, else the one beside the file, if the file takes what a tokenizer gives."""
    file = path.parent / "tokenizer.json" if tokenizer is None else Path(tokenizer)
    if tokenizer is not None and (file.name != "tokenizer.json" or not file.is_file()):
        raise LoadError(f"--tokenizer {tokenizer}: expected a file that is named tokenizer.json")
    names = [spec.name for spec in specs]
    fixed = [spec.name for spec in specs if not all(isinstance(dim, Dim) for dim in spec.dims)]
    unknown = [name for name in names if name not in _TEXT]
    if fixed or unknown or "input_ids" not in names:
        if file.is_file():
            reason = f"{fixed[0]} has a fixed size" if fixed else f"text doesn't give {(*unknown, 'input_ids')[0]}"
            _log.warning("%s is not used: %s; the artifact takes arrays only", file, reason)
        return None
    config = file.parent / "config.json"
    pad_id = read_json(config).get("pad_token_id") if config.is_file() else None
    return read_text(file.parent, {"pad_token_id": pad_id}, specs, max_length, "softmax")
