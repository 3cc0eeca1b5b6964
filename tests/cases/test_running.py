"""Cases of running: threads, memory, repeatability, padding, and what a benchmark tells."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tx_export import benchmark
from tx_export.metrics import fidelity_bound
from tx_export.runtime import Model, UsageError, bench
from tx_export.timing import Plan

_HEAD = """
import os, sys
import numpy as np
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
"""


def shipped(artifact: Path, code: str) -> list[str]:
    """The words that a process of its own prints after importing the artifact's run.py; its stderr has notices only."""
    command = [sys.executable, "-c", f"{_HEAD}import run\n{code}", str(artifact)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and all(line.startswith("notice: ") for line in done.stderr.splitlines()), done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("count", [1, 2])
def test_b190_threads_are_the_cpus_that_the_affinity_allows(cls_artifact: Path, count: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:count]
    code = f"""
os.sched_setaffinity(0, {cpus})
model = run.Model(sys.argv[1])
model.run_arrays({{"input_ids": np.ones((2, 16), int)}})
print(model.threads, *sorted(model._sessions._by_threads))
"""
    assert shipped(cls_artifact, code) == [str(len(cpus))] * 2


@pytest.mark.parametrize(
    ("threads", "message"),
    [
        (0, "threads: 0 is not at least 1"),
        (-1, "threads: -1 is not at least 1"),
        (1000, "threads: 1000 is more than"),
        (1.5, "threads: 1.5 is not a whole number"),
        ("2", "threads: '2' is not a whole number"),
        (True, "threads: True is not a whole number"),
    ],
)
def test_b190_a_number_of_threads_that_makes_no_sense_is_refused(
    cls_artifact: Path, threads: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Model(cls_artifact, threads=threads)


def test_b191_an_idle_model_takes_no_cpu(cls_artifact: Path) -> None:
    # ONNX Runtime's threads spin for some 0.1 s after a run, which is quicker than waking them, and then sleep.
    code = """
import time
model = run.Model(sys.argv[1], threads=2)
model.run_arrays({"input_ids": np.ones((8, 128), int)})
before = time.process_time()
time.sleep(2)
print(time.process_time() - before)
"""
    [spent] = shipped(cls_artifact, code)
    assert float(spent) <= 0.5  # s; two threads that don't stop to spin would take 2 to 4


def test_b192_memory_stays_flat_with_varied_shapes(cls_artifact: Path) -> None:
    code = """
model = run.Model(sys.argv[1], threads=1)
random = np.random.default_rng(0)
for count in range(1, 501):
    model.run_arrays({"input_ids": random.integers(0, 1000, (random.integers(1, 9), random.integers(1, 129)))})
    if count in (100, 500): print(int(open("/proc/self/statm").read().split()[1]))
"""
    hundred, all_of_them = map(int, shipped(cls_artifact, code))
    assert all_of_them <= 1.3 * hundred


@pytest.mark.parametrize("kind", ["cls_artifact", "cls_int8"])
def test_b194_the_same_input_gives_the_same_bits(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    feeds = {"input_ids": np.random.default_rng(1).integers(0, 1000, (3, 40))}
    answers = {}
    for threads in (1, 4):
        models = [Model(folder, threads=threads) for _ in range(2)]
        found = [model.run_arrays(feeds)["logits"] for model in models for _ in range(20)]
        assert all(np.array_equal(array, found[0]) for array in found)
        answers[threads] = found[0]
    if kind == "cls_artifact":
        assert np.abs(answers[1] - answers[4]).max() <= 1e-5  # the case's bound; sums in another order


def test_b196_a_benchmark_tells_what_it_measured_and_how_often(cls_artifact: Path) -> None:
    plan = Plan(rounds=2, calls=3, seconds=0.0, pause=0.0)
    options: dict[str, Any] = {"source": None, "batch": (1, 2), "tokens": (16,), "against": (), "threads": 1}
    report = benchmark.bench(cls_artifact, **options, progress=lambda line: None, plan=plan)
    assert {"threads", "cpu", "onnxruntime", "torch", "pipeline"} <= report.keys()
    assert [(row["batch"], row["tokens"], row["provider"]) for row in report["rows"]] == [
        (1, 16, "cpu"),
        (2, 16, "cpu"),
    ]
    for row in report["rows"]:
        # Two rounds of three calls; those that warm up, and the first of each round, are not among them.
        assert row["calls"] == 6 and len(row["rounds_ms"]) == 2
        assert 0 < row["p50_ms"] <= row["p95_ms"] and row["first_ms"] > 0 and "spread" in row


def test_b196_the_shipped_script_tells_the_same(cls_artifact: Path) -> None:
    report = bench(cls_artifact, [1], [16], threads=1, seconds=0.01)
    assert {"rows", "threads", "cpu", "onnxruntime"} == report.keys()
    assert {"batch", "tokens", "p50_ms", "p95_ms", "first_ms", "runs", "provider"} <= report["rows"][0].keys()


def test_b198_texts_are_padded_to_the_longest_of_their_batch_only(
    cls_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(cls_artifact, threads=1)
    assert model._tokenizer is not None
    random = np.random.default_rng(0)
    texts = [" ".join("abcdefghij"[i] for i in random.integers(0, 10, count)) for count in random.integers(3, 14, 32)]
    rows = [model._tokenizer.encode(place, text).ids for place, text in enumerate(texts)]
    assert {len(row) for row in rows} == set(range(5, 16))
    fed: list[np.ndarray] = []
    run = model._sessions.run

    def record(threads: int, outputs: Any, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        fed.append(feeds["attention_mask"])
        return run(threads, outputs, feeds)

    monkeypatch.setattr(model._sessions, "run", record)
    found = np.array([list(result["scores"].values()) for result in model(texts)])
    assert all(mask.sum(axis=1).max() == mask.shape[1] for mask in fed) and len(fed) < 8
    # Reference: the same ids, each padded to the model's 128.
    ids, mask = np.zeros((2, 32, 128), np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)], mask[place, : len(row)] = row, 1
    logits = model.run_arrays({"input_ids": ids, "attention_mask": mask})["logits"].astype(np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    assert np.abs(found - expected).max() <= min(1e-5, fidelity_bound(1.0))
