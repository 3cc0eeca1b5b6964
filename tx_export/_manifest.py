"""What an artifact says of itself: manifest.json and samples.npz. Values are read back from the file."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from torch import nn

import tx_export
from tx_export._attention_candidates import candidates
from tx_export._precisions import multiply_adds, weights
from tx_export.export import least_onnxruntime
from tx_export.metrics import Meter, fidelity_bound
from tx_export.models.parts.attention import Attention
from tx_export.passes import Coverage, Left, Pipeline
from tx_export.spec import CacheSpec, EagerModel, GenerationSpec, TensorSpec
from tx_export.verify import eager_runner, grid

__all__ = ["describe", "samples"]

Runner = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]

_CONTROL_FLOW = ("If", "Loop", "Scan")
_ATTENTION = ("Attention", "MultiHeadAttention", "QAttention", "GroupQueryAttention")
_PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")
_SAMPLE_TOKENS, _SAMPLE_BYTES = 17, 1_000_000
_MARGIN_DB = 3.0  # another machine may round otherwise; a fault costs far more


def describe(
    graph: ir.Model,
    model: EagerModel,
    provider: Any,
    pipeline: Pipeline,
    verification: Mapping[str, Any],
    changed: Mapping[str, Coverage],
) -> dict[str, Any]:
    """The manifest without its list of files; `graph` is what the files hold."""
    nothing = Coverage(0, 0)
    return {
        "format_version": 1,
        "name": model.name,
        "task": model.task,
        "source": model.source,
        "config": dict(model.config),
        "weights": model.weights,
        "pipeline": str(pipeline),
        **_graph_facts(graph),
        # A model that generates has a cache and more besides.
        "inputs": _tensors(model.inputs, graph.graph.inputs),
        "outputs": _tensors(model.outputs, graph.graph.outputs),
        **({} if model.cache is None else {"generation": _generation(model.cache, model.generation)}),
        "text": None if model.text is None else _text(model),
        "heads_per_layer": _heads(graph, model.module),
        "fused": _fused(graph, changed).to_json(),
        "quantized": _quantized(graph.graph, changed.get("quantized", nothing)),
        "pruned": changed.get("pruned", nothing).to_json(),
        **{key: changed[key].to_json() for key in ("pruned_neurons", "pruned_weights") if key in changed},
        "kept_heads": {str(layer): list(heads) for layer, heads in changed.get("pruned", nothing).kept},
        **({"isa": provider.isa} if provider.isa else {}),
        "session": {provider.__class__.__module__.rpartition(".")[2]: provider.session()},
        "verification": verification,
        "verified_on": {"provider": "cpu", "instruction_sets": _instruction_sets()},
        "versions": {"tx-export": tx_export.__version__} | {name: metadata.version(name) for name in _PACKAGES},
    }


def _graph_facts(graph: ir.Model) -> dict[str, Any]:
    """What the file asks of a runtime, and what it holds that people should know of."""
    domains = Counter(node.domain or "ai.onnx" for node in graph.graph.all_nodes())
    operators = Counter(node.op_type for node in graph.graph.all_nodes())
    return {
        "opset": graph.opset_imports[""],
        "ir_version": graph.ir_version,
        "domains": {
            domain: {"version": graph.opset_imports["" if domain == "ai.onnx" else domain], "nodes": count}
            for domain, count in sorted(domains.items())
        },
        "control_flow": {name: operators[name] for name in _CONTROL_FLOW},
        "batch_dependent": operators["DynamicQuantizeLinear"] > 0,  # one scale for the activations of a whole batch
        "min_onnxruntime": least_onnxruntime(graph),
    }


def _instruction_sets() -> list[str]:
    known = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm")
    try:
        fields = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].split()
    except OSError:
        fields = []
    return [name for name in known if name in fields]


def _tensors(specs: Sequence[TensorSpec], values: Sequence[ir.Value]) -> list[dict[str, Any]]:
    by_name = {value.name: value for value in values}
    return [_tensor(spec, by_name[spec.name]) for spec in specs]


def _tensor(spec: TensorSpec, value: ir.Value) -> dict[str, Any]:
    """As the file has it; it can't tell bounds of dimensions and of values, nor a dtype that the source has instead."""
    assert value.dtype is not None
    dtype = value.dtype.numpy().name
    values = {} if spec.low is None or spec.high is None else {"range": [spec.low, spec.high]}
    dims = [dim if isinstance(dim, int) else str(dim) for dim in spec.dims]
    source = {} if dtype == spec.dtype else {"source_dtype": spec.dtype}
    return {"name": value.name, "dtype": dtype, **source, "dims": dims} | values


def _generation(cache: CacheSpec, generation: GenerationSpec | None) -> dict[str, Any]:
    return {"cache": dataclasses.asdict(cache), **dataclasses.asdict(generation or GenerationSpec())}


def _text(model: EagerModel) -> dict[str, Any]:
    assert model.text is not None
    return {
        "max_length": model.text.max_length,
        "pad_id": model.text.pad_id,
        "labels": list(model.text.labels),
        "scores": model.text.scores,
    }


def _attention_layers(module: nn.Module) -> list[Attention]:
    # One layer that stands at several places (ALBERT) runs at each.
    every = module.named_modules(remove_duplicate=False)
    return [layer for _, layer in every if isinstance(layer, Attention)]


def _heads(graph: ir.Model, module: nn.Module) -> list[int]:
    """Of each layer; from our modules where attention is written with plain operators."""
    nodes = [node for node in graph.graph.all_nodes() if node.op_type in _ATTENTION]
    counted = [node.attributes.get_int("num_heads", node.attributes.get_int("q_num_heads", 0)) for node in nodes]
    return counted or [layer.num_heads for layer in _attention_layers(module)]


def _fused(graph: ir.Model, changed: Mapping[str, Coverage]) -> Coverage:
    """One operator for each attention; those written with plain operators are left."""
    done = sum(node.op_type in _ATTENTION for node in graph.graph.all_nodes())
    told = changed.get("fuse_attention", Coverage(0, 0)).left
    reasons = {item.name: item.reason for item in told}
    names = [softmax.outputs[0].name or softmax.op_type for softmax in candidates(graph.graph)]
    left = tuple(Left(name, reasons.get(name, "written with plain operators")) for name in names)
    return Coverage(done, done + len(left), left)


def _quantized(graph: ir.Graph, told: Coverage) -> dict[str, Any]:
    """Each weight with its bytes and, if a pass left it, the reason; the share of multiply-adds of each precision."""
    shares = {precision: round(share, 6) for precision, share in multiply_adds(graph).items()}
    if not told.done:
        return told.to_json() | {"multiply_adds": shares}
    before = {item.name: item.before for item in told.stored}
    reasons = {item.name: item.reason for item in told.left}
    stored: list[dict[str, Any]] = []
    for weight in weights(graph):
        # What stands in two forms has its bytes before with the first.
        is_second = any(item["name"] == weight.name for item in stored)
        stays = weight.form in ("float32", "float64")
        whole = before.get(weight.name, weight.after if stays else 4 * weight.elements)
        item = {"name": weight.name, "before": 0 if is_second else whole, "after": weight.after, "form": weight.form}
        reason = next((reasons[name] for name in (weight.name, *weight.readers) if name in reasons), None)
        stored.append(item if reason is None else item | {"reason": reason})
    found = {item["name"] for item in stored}
    stored += [dataclasses.asdict(item) for item in told.stored if item.name not in found]
    return told.to_json() | {"stored": stored, "multiply_adds": shares}


def samples(model: EagerModel, path: Path, runner: Runner | None) -> dict[str, float]:
    """Write samples.npz: inputs and eager outputs for every kind of mask; returns what the self-test must reach."""
    eager = eager_runner(model)
    arrays: dict[str, np.ndarray] = {}
    meter, size = Meter(), 0
    cases = (case for case in grid(model, _SAMPLE_TOKENS) if max(case.shape[:1], default=1) <= 3)
    # Hugging Face promises nothing for an empty row, so there is nothing to hold one to.
    for number, case in enumerate(case for case in cases if (model.padding, case.mask) != ("right", "empty")):
        outputs = eager(case.feeds)
        size += sum(array.nbytes for array in (*case.feeds.values(), *outputs.values()))
        if size > _SAMPLE_BYTES and number > 0:
            break
        arrays |= {f"case{number:02d}/input/{name}": array for name, array in case.feeds.items()}
        arrays |= {f"case{number:02d}/output/{name}": array for name, array in outputs.items()}
        arrays[f"case{number:02d}/mask_kind"] = np.array(case.mask)
        for name, array in (runner(case.feeds) if runner is not None else {}).items():
            meter.add(np.atleast_1d(outputs[name]), np.atleast_1d(array))
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    difference = meter.result()
    if runner is None or difference.max_abs <= fidelity_bound(difference.largest):
        return {"max_abs": 10 * fidelity_bound(difference.largest), "sqnr_db": 60.0}
    return {"sqnr_db": round(difference.sqnr_db - _MARGIN_DB, 1)}
