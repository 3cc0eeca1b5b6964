"""Where the time of a graph goes: the kernels of ONNX Runtime, by operator."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tx_export import runtime
from tx_export.errors import ArtifactError

__all__ = ["profile"]

_WARM, _RUNS, _TOKENS = 3, 10, 128
_PLAIN: Mapping[str, Any] = {"provider": "CPUExecutionProvider"}
_DTYPES = {"float": "float32", "double": "float64"}  # ONNX Runtime's names -> NumPy's


def profile(path: Path) -> list[dict[str, Any]]:
    """For each graph of an artifact, or an ONNX file: milliseconds a run by operator, the slowest first.

    One row of 128 tokens is read, or of as many as the artifact takes; where there is a cache, also one token behind.
    """
    if not path.is_dir():
        return [_report(path, _PLAIN, {}, _TOKENS, 0)]
    manifest = runtime.read_manifest(path)
    settings = next(iter(manifest["session"].values()))
    ranges = {item["name"]: item["range"] for item in manifest["inputs"] if item.get("range")}
    tokens, found = _most_tokens(manifest), []
    for name in sorted(name for name in manifest["files"] if name.endswith(".onnx")):
        found.append(_report(path / name, settings, ranges, tokens, 0))
        if manifest.get("generation") and name != "encoder.onnx":
            past = min(tokens, manifest["generation"]["cache"]["max_length"] - 1)
            found.append(_report(path / name, settings, ranges, tokens, past))
    return found


def _most_tokens(manifest: Mapping[str, Any]) -> int:
    dims = [str(dim) for item in manifest["inputs"] for dim in item["dims"]]
    limits = [int(dim.split("<=")[1]) for dim in dims if dim.startswith("tokens<=")]
    cache = (manifest.get("generation") or {}).get("cache")
    return min(_TOKENS, *limits, _TOKENS if cache is None else cache["max_length"])


def _report(
    path: Path, settings: Mapping[str, Any], ranges: Mapping[str, list[float]], tokens: int, past: int
) -> dict[str, Any]:
    times: dict[str, float] = defaultdict(float)
    nodes: dict[str, set[str]] = defaultdict(set)
    for event in _events(path, settings, ranges, tokens, past):
        operator = event["args"].get("op_name", "")
        times[operator] += event["dur"] / 1000 / (_WARM + _RUNS)
        nodes[operator].add(event["name"])
    whole = sum(times.values())
    rows = [
        {"operator": name, "nodes": len(nodes[name]), "ms": round(ms, 4), "share": round(ms / whole, 4)}
        for name, ms in sorted(times.items(), key=lambda item: -item[1])
    ]
    run = f"1x1 behind {past}" if past else f"1x{tokens}"
    return {"file": path.name, "run": run, "ms": round(whole, 4), "operators": rows}


def _events(
    path: Path, settings: Mapping[str, Any], ranges: Mapping[str, list[float]], tokens: int, past: int
) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            session = _session(path, settings, Path(folder) / "profile")
            feeds = _feeds(session.get_inputs(), ranges, tokens, past)
            for _ in range(_WARM + _RUNS):
                session.run(None, feeds)
        except Exception as error:  # ONNX Runtime raises many kinds
            raise ArtifactError(f"{path}: can't be profiled: {next(iter(str(error).splitlines()), '')}") from error
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    yield from (event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"))


def _session(path: Path, settings: Mapping[str, Any], prefix: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = runtime.available_threads(), 4
    options.enable_profiling, options.profile_file_prefix = True, str(prefix)
    for key, value in (settings.get("config") or {}).items():
        options.add_session_config_entry(key, str(value))
    disabled = settings.get("disabled_optimizers")
    with runtime.environment_of(settings):
        return onnxruntime.InferenceSession(
            str(path), options, providers=[settings["provider"]], disabled_optimizers=disabled
        )


def _feeds(inputs: Sequence[Any], ranges: Mapping[str, list[float]], tokens: int, past: int) -> dict[str, np.ndarray]:
    """Full masks and seeded values; a dim that isn't known is the batch of one where it comes first, else tokens."""
    new = 1 if past else tokens
    source = tokens if any(item.name == "decoder_input_ids" for item in inputs) else new
    sizes = {"kept": 1, "past": past, "total": past + new, "decoded": new, "tokens": source}
    feeds = {}
    for item in inputs:
        shape = [
            dim if isinstance(dim, int) else sizes.get(str(dim), tokens if place else 1)
            for place, dim in enumerate(item.shape)
        ]
        kind = item.type.removeprefix("tensor(").removesuffix(")")
        feeds[item.name] = _values(item.name, shape, np.dtype(_DTYPES.get(kind, kind)), ranges.get(item.name))
    return feeds | ({"logits_at": np.array([new - 1])} if "logits_at" in feeds else {})


def _values(name: str, shape: Sequence[int], dtype: np.dtype[Any], span: list[float] | None) -> np.ndarray:
    random = np.random.default_rng(0)
    if name.endswith("mask"):
        return np.ones(shape, dtype)
    if dtype.kind == "f":
        return random.standard_normal(shape).astype(dtype)
    low, high = (0, 1) if span is None else (int(span[0]), int(span[1]))
    return random.integers(low, high, shape, endpoint=True).astype(dtype)
