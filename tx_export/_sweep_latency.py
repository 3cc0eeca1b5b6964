"""The latency of a sweep's points: each beside the same reference, in rounds that alternate.

All points at once would take the memory of all; one after the other would hold the first against the last, between
which the machine may have changed. So what is compared is each point's ratio to the reference; 1 within noise.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tx_export._bench_feeds import artifact_contender, inputs_of, write_feeds
from tx_export.runtime import read_manifest
from tx_export.timing import Plan, Shape, compare, measure

__all__ = ["Latency", "put_on_one_scale", "time_beside"]

Latency = dict[str, dict[str, float]]  # by shape, say 1x16


def time_beside(
    reference: Path,
    point: Path,
    shapes: Sequence[Shape],
    load: Mapping[str, Any],
    progress: Callable[[str], None],
    plan: Plan | None,
) -> Latency:
    """Of the artifact of a point: its p50_ms, that of the reference in the same rounds, and its ratio to that.

    `load` holds provider and threads.
    """
    with tempfile.TemporaryDirectory(prefix="tx-export-sweep-") as scratch:
        contenders = []
        for folder in dict.fromkeys((reference, point)):
            feeds = Path(scratch) / folder.name  # of its own: a cache has as many heads as are left
            feeds.mkdir()
            write_feeds(feeds, inputs_of(read_manifest(folder)), shapes)
            what = {**load, "artifact": str(folder.resolve()), "feeds": str(feeds)}
            contenders.append(artifact_contender(folder.name, what))
        timings = measure(contenders, shapes, progress, plan)
    found = {}
    for shape in shapes:
        here = [timing for timing in timings if timing.shape == shape]
        base, ours = here[0], here[-1]
        versus = compare(ours, base)
        found[str(shape)] = {
            "ratio": 1.0 if versus.verdict == "within noise" else round(versus.ratio, 4),
            "p50_ms": round(ours.p50_ms, 4),
            "reference_p50_ms": round(base.p50_ms, 4),
        }
    return found


def put_on_one_scale(latencies: Iterable[Latency]) -> None:
    """Add `ms` to each: its ratio times the reference's median over all of them."""
    entries = [(shape, figures) for latency in latencies for shape, figures in latency.items()]
    for shape, figures in entries:
        base = statistics.median(other["reference_p50_ms"] for name, other in entries if name == shape)
        figures["ms"] = round(figures["ratio"] * base, 4)
