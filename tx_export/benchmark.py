"""Latency, throughput and memory of an artifact beside eager PyTorch, torch.compile and its fp32 build."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tx_export.runtime import UsageError, available_threads, cpu_name, read_manifest
from tx_export.spec import Dim, TensorSpec
from tx_export.timing import Contender, Plan, Shape, Timing, compare, measure

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["bench", "chart", "remarks", "table"]

_AGAINST = ("eager", "compile", "fp32")
_SEED = 0
_WIDE_SPREAD = 0.2  # between rounds; on an idle machine they lie within a few percent


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

    All contenders get the same threads and the same full random batches; sizes over a bound are dropped, with a line
    to `progress`. Raises UsageError for an unknown contender or when no size is left, and TxExportError for a
    contender that fails.
    """
    if unknown := [name for name in against if name not in _AGAINST]:
        raise UsageError(f"bench: unknown contender {unknown[0]!r}; known: {', '.join(_AGAINST)}")
    manifest = read_manifest(artifact)
    inputs = [_tensor(item) for item in manifest["inputs"]]
    shapes = list(_within_bounds(inputs, batch, tokens, progress))
    if not shapes:
        raise UsageError(f"bench: no size is within the bounds of {artifact}")
    threads = available_threads() if threads is None else threads
    with tempfile.TemporaryDirectory(prefix="tx-export-bench-") as scratch:
        _write_feeds(Path(scratch), inputs, shapes)
        load = {
            "artifact": str(artifact.resolve()),
            "source": source,
            "provider": next(iter(manifest["session"])),
            "threads": threads,
            "feeds": scratch,
        }
        contenders = [_contender(name, load) for name in dict.fromkeys(against) if name != "fp32"]
        if "fp32" in against:
            folder = _build_fp32(manifest, source, Path(scratch) / "fp32", progress)
            contenders.append(_artifact_contender("fp32", load | {"artifact": str(folder)}))
        name = manifest["name"] if manifest["name"] not in _AGAINST else "artifact"
        contenders.append(_artifact_contender(name, load))
        timings = measure(contenders, shapes, progress, plan)
    return {
        "artifact": name,
        "pipeline": manifest.get("pipeline", ""),
        "rows": _rows(timings, shapes, name),
        "threads": threads,
        "cpu": cpu_name(),
        "onnxruntime": version("onnxruntime"),
        "torch": version("torch"),
    }


def remarks(report: Mapping[str, Any]) -> list[str]:
    """Plain lines: who is faster or slower by how much, what is within noise, and which rows are too noisy to trust."""
    lines = []
    for row in report["rows"]:
        against = row["against_artifact"]
        shape = Shape(row["batch"], row["tokens"])
        if against is not None:
            lines.append(_comparison(report["artifact"], row["contender"], shape, **against))
        if row["spread"] > _WIDE_SPREAD:
            lines.append(
                f"{row['contender']} {shape}: rounds differ by {row['spread']:.0%}; the machine was not quiet enough"
            )
    return lines


def table(report: Mapping[str, Any]) -> Table:
    """A table for the terminal, with the remarks below it."""
    from rich.table import Table

    title = (
        f"{report['cpu']}, {report['threads']} threads, onnxruntime {report['onnxruntime']}, torch {report['torch']}"
    )
    shown = Table(title=title, caption="\n".join(remarks(report)), caption_justify="left")
    columns = (
        "contender",
        "provider",
        "batch",
        "tokens",
        "p50 ms",
        "p95 ms",
        "first ms",
        "tokens/s",
        "peak MB",
        "load ms",
    )
    for column in columns:
        shown.add_column(column, justify="left" if column in ("contender", "provider") else "right", no_wrap=True)
    previous = None
    for row in report["rows"]:
        if previous not in (None, (row["batch"], row["tokens"])):
            shown.add_section()
        previous = (row["batch"], row["tokens"])
        milliseconds = [f"{row[key]:.2f}" for key in ("p50_ms", "p95_ms", "first_ms")]
        whole = [f"{row[key]:,.0f}" for key in ("tokens_per_s", "peak_rss_mb", "load_ms")]
        shown.add_row(row["contender"], row["provider"], str(row["batch"]), str(row["tokens"]), *milliseconds, *whole)
    return shown


def chart(report: Mapping[str, Any], path: Path) -> None:
    """Draw the medians as grouped bars into a PNG; TxExportError names the extra when matplotlib is absent."""
    from tx_export._bench_chart import draw

    draw(report, path)


def _comparison(artifact: str, contender: str, shape: Shape, ratio: float, verdict: str) -> str:
    """`ratio` is the contender's time by the artifact's, and `verdict` is said of the contender."""
    if verdict == "within noise":
        return f"{shape}: {artifact} and {contender} are within noise"
    if verdict == "slower":
        return f"{shape}: {artifact} is {ratio:.2f} times as fast as {contender}"
    return f"{shape}: {artifact} is {1 / ratio - 1:.0%} slower than {contender} here"


def _tensor(item: Mapping[str, Any]) -> TensorSpec:
    """From the manifest's form: name, dtype, dims as text, and maybe a range."""
    values = "{{{}..{}}}".format(*item["range"]) if item.get("range") else ""
    return TensorSpec.parse(f"{item['name']}:{item['dtype']}[{','.join(map(str, item['dims']))}]{values}")


def _within_bounds(
    inputs: Sequence[TensorSpec], batch: Sequence[int], tokens: Sequence[int], progress: Callable[[str], None]
) -> Iterator[Shape]:
    rows = [tensor.dims[0] for tensor in inputs if tensor.dims]
    columns = [dim for tensor in inputs for dim in tensor.dims[1:]]
    kept = {}
    for kind, dims, sizes in (("batch", rows, batch), ("tokens", columns, tokens)):
        bound = min((dim.bound for dim in dims if isinstance(dim, Dim) and dim.bound is not None), default=None)
        kept[kind] = [size for size in dict.fromkeys(sizes) if bound is None or size <= bound]
        for size in dict.fromkeys(sizes):
            if size not in kept[kind]:
                progress(f"{kind} {size} is left out: the artifact takes up to {bound}")
    yield from (Shape(b, t) for b in kept["batch"] for t in kept["tokens"])


def _write_feeds(folder: Path, inputs: Sequence[TensorSpec], shapes: Sequence[Shape]) -> None:
    """Seeded values in their ranges, masks full; the first dim of all is the batch, the other names are tokens."""
    rows = str(inputs[0].dims[0]).partition("<=")[0] if inputs[0].dims else ""
    for shape in shapes:
        random = np.random.default_rng(_SEED)
        feeds = {}
        for tensor in inputs:
            names = [dim.name for dim in tensor.dims if isinstance(dim, Dim)]
            sizes = {name: shape.batch if name == rows else shape.tokens for name in names}
            feeds[tensor.name] = _values(tensor, tensor.shape(sizes), random)
        np.savez(folder / f"{shape}.npz", **feeds)  # type: ignore[arg-type]


def _values(tensor: TensorSpec, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if tensor.is_mask:
        return np.ones(shape, tensor.dtype)
    low, high = tensor.low or 0, 1 if tensor.high is None else tensor.high
    if np.dtype(tensor.dtype).kind == "f":
        return random.uniform(low, high, shape).astype(tensor.dtype)
    return random.integers(int(low), int(high), shape, endpoint=True).astype(tensor.dtype)


def _contender(name: str, load: Mapping[str, Any]) -> Contender:
    # One compiling thread: a pool of compilers would go on using the machine beside the others.
    environment = {"OMP_NUM_THREADS": str(load["threads"]), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return Contender(name, (sys.executable, "-m", "tx_export._bench_worker", name), load, environment)


def _artifact_contender(name: str, load: Mapping[str, Any]) -> Contender:
    return Contender(name, (sys.executable, "-m", "tx_export._bench_worker", "artifact"), load)


def _build_fp32(manifest: Mapping[str, Any], source: str | None, output: Path, progress: Callable[[str], None]) -> Path:
    """The same model without quantization or pruning, by our own build."""
    from tx_export.compiler import BuildOptions, build

    progress("building fp32")
    source = manifest["source"] if source is None else source
    text, weights = manifest.get("text"), manifest["weights"]
    options = {
        "source": source,
        "weights": f"random:{weights.split()[-1]}" if weights.startswith("random") else None,
        "max_length": text["max_length"] if text else None,
        "quantize": "none",
        "provider": next(iter(manifest["session"])),
        "output": output,
        "force": True,
    }
    if ":" in source:
        options |= {"task": manifest["task"], "inputs": tuple(str(_tensor(item)) for item in manifest["inputs"])}
    elif Path(source).is_dir():
        options |= {"task": manifest["task"]}
    else:
        options |= {"settings": {key: str(value) for key, value in manifest["config"].items()}}
    return build(BuildOptions(**options), progress)


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
