"""Latency, throughput and memory of an artifact beside eager PyTorch, torch.compile and its fp32 build."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tx_export._bench_feeds import artifact_contender, inputs_of, within_bounds, write_feeds
from tx_export._bench_report import chart, record, remarks, table
from tx_export.runtime import UsageError, available_threads, cpu_name, read_manifest
from tx_export.timing import Contender, Plan, Shape, Timing, compare, measure

__all__ = ["bench", "chart", "record", "remarks", "table"]

_AGAINST = ("eager", "compile", "fp32")


def bench(
    artifact: Path,
    *,
    source: str | None,
    batch: tuple[int, ...],
    tokens: tuple[int, ...],
    against: tuple[str, ...],
    threads: int | None,
    progress: Callable[[str], None],
    plan: Plan | None = None,
) -> dict[str, Any]:
    """The rows that `bench --json` prints, by shape and then by contender, the artifact last.

    All contenders get the same threads and full random batches; `progress` is told which sizes are over a bound.
    Raises UsageError for an unknown contender or when no size is left, and TxExportError for a contender that fails.
    """
    if unknown := [name for name in against if name not in _AGAINST]:
        raise UsageError(f"bench: unknown contender {unknown[0]!r}; known: {', '.join(_AGAINST)}")
    inputs = inputs_of(manifest := read_manifest(artifact))
    shapes = list(within_bounds(inputs, batch, tokens, progress))
    if not shapes:
        raise UsageError(f"bench: no size is within the bounds of {artifact}")
    if manifest.get("generation") is not None:
        progress("timed is a prompt of so many tokens, read from an empty cache up to the logits of its last one")
    if against:
        _check_source(manifest, source)
        against = _possible(against, source or manifest["source"], progress)
    threads = available_threads() if threads is None else threads
    name = manifest["name"] if manifest["name"] not in _AGAINST else "artifact"
    with tempfile.TemporaryDirectory(prefix="tx-export-bench-") as scratch:
        write_feeds(Path(scratch), inputs, shapes)
        load = {"artifact": str(artifact.resolve()), "source": source, "threads": threads, "feeds": scratch}
        load |= {"provider": next(iter(manifest["session"]))}
        contenders = [_contender(each, load) for each in dict.fromkeys(against) if each != "fp32"]
        if "fp32" in against:
            folder = _build_fp32(manifest, source, Path(scratch) / "fp32", progress)
            contenders.append(artifact_contender("fp32", load | {"artifact": str(folder)}))
        contenders.append(artifact_contender(name, load))
        timings = measure(contenders, shapes, progress, plan)
    return _report(manifest, name, threads, _rows(timings, shapes, name))


def _possible(against: tuple[str, ...], source: str, progress: Callable[[str], None]) -> tuple[str, ...]:
    """Without torch.compile where the source is an ONNX file, whose eager form is the file itself in ONNX Runtime."""
    if not source.endswith(".onnx") or "compile" not in against:
        return against
    progress(f"compile is left out: {source} is no PyTorch module")
    return tuple(name for name in against if name != "compile")


def _check_source(manifest: Mapping[str, Any], source: str | None) -> None:
    """Fail now, with the source's own error, rather than in a worker."""
    from tx_export.compiler import source_of

    source_of(manifest, source)


def _contender(name: str, load: Mapping[str, Any]) -> Contender:
    # One compiling thread: a pool of compilers would go on using the machine beside the others.
    environment = {"OMP_NUM_THREADS": str(load["threads"]), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return Contender(name, (sys.executable, "-m", "tx_export._bench_worker", name), load, environment)


def _build_fp32(manifest: Mapping[str, Any], source: str | None, output: Path, progress: Callable[[str], None]) -> Path:
    """The same model without quantization or pruning, by our own build; the source is found as `source_of` finds it."""
    from tx_export._sources import origin_of
    from tx_export.compiler import BuildOptions, build

    progress("building fp32")
    origin = origin_of(manifest, source)
    options = BuildOptions(
        source=origin.source,
        size=origin.size,
        settings=origin.settings,
        weights=origin.weights,
        task=origin.task,
        inputs=origin.inputs,
        max_length=origin.max_length,
        quantize="none",
        provider=next(iter(manifest["session"])),
        output=output,
    )
    return build(options, lambda line: None)


def _report(manifest: Mapping[str, Any], name: str, threads: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "artifact": name,
        "pipeline": manifest.get("pipeline", ""),
        "rows": rows,
        "threads": threads,
        "cpu": cpu_name(),
        "onnxruntime": version("onnxruntime"),
        "torch": version("torch"),
    }


def _rows(timings: Sequence[Timing], shapes: Sequence[Shape], artifact: str) -> list[dict[str, Any]]:
    found = []
    for shape in shapes:
        here = [timing for timing in timings if timing.shape == shape]
        ours = next(timing for timing in here if timing.contender == artifact)
        found += [_row(timing, ours) for timing in here]
    return found


def _row(timing: Timing, ours: Timing) -> dict[str, Any]:
    versus = compare(timing, ours)
    return {
        "contender": timing.contender,
        "provider": timing.provider,
        "batch": timing.shape.batch,
        "tokens": timing.shape.tokens,
        "p50_ms": round(timing.p50_ms, 4),
        "p95_ms": round(timing.p95_ms, 4),
        "tokens_per_s": round(timing.tokens_per_s, 1),
        "peak_rss_mb": round(timing.peak_rss_mb, 1),
        "load_ms": round(timing.load_ms, 1),
        "first_ms": round(timing.first_ms, 4),
        "spread": round(timing.spread, 4),
        "calls": sum(map(len, timing.rounds)),
        "rounds_ms": [round(median, 4) for median in timing.medians],
        "against_artifact": None if timing is ours else {"ratio": round(versus.ratio, 4), "verdict": versus.verdict},
    }
