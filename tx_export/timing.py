"""How long contenders take: each in a process of its own, rounds alternating, so that none disturbs another.

A worker answers each JSON line on its standard input with one on its standard output, and ends when its input does:

    {"load": anything}                               -> {"load_ms": x, "provider": name}
    {"time": {"batch": b, "tokens": t}, "calls": n}  -> {"ms": [n times], "peak_rss_mb": x}
    either                                           -> {"error": message}

Between answers it is blocked, so the one that is measured has the machine to itself.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from tx_export._worker_process import WorkerProcess

__all__ = ["Comparison", "Contender", "Plan", "Shape", "Timing", "compare", "measure"]

Verdict = Literal["faster", "slower", "within noise"]

_LEAST_DIFFERENCE = 0.02  # smaller differences change sign from run to run on an idle machine


class Shape(NamedTuple):
    """Rows and tokens per row."""

    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens}"


@dataclass(frozen=True)
class Contender:
    """A name, the command of its worker, and what the worker is told to load (any JSON)."""

    name: str
    command: tuple[str, ...]
    load: Any = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How often and how long to measure."""

    rounds: int = 5  # with fewer, rounds that agree by chance are common
    calls: int = 5  # at least, per round
    seconds: float = 0.3  # at least, per round: many calls when they are quick
    warm_up: int = 3  # calls at each new shape that are not counted
    pause: float = 0.2  # seconds before each turn; ONNX Runtime's threads spin for 0.1 s and more after a call
    timeout: float = 900.0  # seconds for one answer; a compiler may take minutes for the first call


@dataclass(frozen=True)
class Timing:
    """What one contender took at one shape."""

    contender: str
    provider: str
    shape: Shape
    rounds: tuple[tuple[float, ...], ...]  # ms of each counted call; every round has as many calls
    first_ms: float  # the first call at this shape, not counted
    load_ms: float  # imports, reading the weights, creating the session
    peak_rss_mb: float  # the most memory that the process had so far; small shapes are measured first

    @property
    def medians(self) -> tuple[float, ...]:
        """The median of each round, in ms."""
        return tuple(statistics.median(calls) for calls in self.rounds)

    @property
    def p50_ms(self) -> float:
        return self.percentile(50)

    @property
    def p95_ms(self) -> float:
        return self.percentile(95)

    def percentile(self, percent: float) -> float:
        """Over the calls of all rounds, in ms."""
        return float(np.percentile(np.concatenate(self.rounds), percent))

    @property
    def tokens_per_s(self) -> float:
        return self.shape.batch * self.shape.tokens / self.p50_ms * 1e3

    @property
    def spread(self) -> float:
        """How far the medians of the rounds lie apart, as a share of their median."""
        return (max(self.medians) - min(self.medians)) / statistics.median(self.medians)


@dataclass(frozen=True)
class Comparison:
    """`ratio` is the median over rounds of one contender's median by the other's, below 1 when it is faster."""

    ratio: float
    verdict: Verdict


def compare(timing: Timing, baseline: Timing) -> Comparison:
    """A difference only if every round has it, there are five or more, and it is over 2%: else it is within noise.

    Rounds alternate, so round i of one is held against round i of the other; five agree by chance 1 time in 16.
    """
    ratios = [ours / theirs for ours, theirs in zip(timing.medians, baseline.medians, strict=True)]
    ratio = statistics.median(ratios)
    agreed = len(ratios) >= 5 and (max(ratios) < 1 or min(ratios) > 1)
    if not agreed or abs(ratio - 1) <= _LEAST_DIFFERENCE:
        return Comparison(ratio, "within noise")
    return Comparison(ratio, "faster" if ratio < 1 else "slower")


def measure(
    contenders: Sequence[Contender],
    shapes: Sequence[Shape],
    progress: Callable[[str], None],
    plan: Plan | None = None,
) -> list[Timing]:
    """Time every contender at every shape, smallest first; TxExportError names a contender that fails or hangs."""
    plan = plan or Plan()
    with ExitStack() as stack:
        workers: list[WorkerProcess] = []
        loaded: list[dict[str, Any]] = []
        for contender in contenders:
            progress(f"loading {contender.name}")
            workers.append(stack.enter_context(_start(contender, plan.timeout)))
            loaded.append(workers[-1].ask({"load": contender.load}))
        timings: list[Timing] = []
        for shape in sorted(shapes, key=lambda shape: (shape.batch * shape.tokens, shape)):
            progress(f"timing {shape}")
            timings += _alternate(workers, loaded, shape, plan)
        return timings


def _alternate(
    workers: Sequence[WorkerProcess], loaded: Sequence[Mapping[str, Any]], shape: Shape, plan: Plan
) -> list[Timing]:
    answers = [_time(worker, shape, plan.warm_up) for worker in workers]
    first = [answer["ms"][0] for answer in answers]
    calls = [max(plan.calls, math.ceil(plan.seconds * 1e3 / max(min(answer["ms"]), 1e-3))) for answer in answers]
    rounds: list[list[tuple[float, ...]]] = [[] for _ in workers]
    for turn in range(plan.rounds):
        for index in _order(len(workers), turn):
            time.sleep(plan.pause)
            # The first call after a pause finds cold caches and sleeping threads.
            answer = answers[index] = _time(workers[index], shape, calls[index] + 1)
            rounds[index].append(tuple(answer["ms"][1:]))
    return [
        Timing(
            contender=worker.name,
            provider=loaded[index]["provider"],
            shape=shape,
            rounds=tuple(rounds[index]),
            first_ms=first[index],
            load_ms=loaded[index]["load_ms"],
            peak_rss_mb=answers[index]["peak_rss_mb"],
        )
        for index, worker in enumerate(workers)
    ]


def _start(contender: Contender, timeout: float) -> WorkerProcess:
    return WorkerProcess(contender.name, contender.command, contender.environment, timeout)


def _time(worker: WorkerProcess, shape: Shape, calls: int) -> dict[str, Any]:
    return worker.ask({"time": shape._asdict(), "calls": calls})


def _order(count: int, turn: int) -> list[int]:
    """Each round starts with the next contender, so that none is always behind the same disturbance."""
    return [(turn + step) % count for step in range(count)]
