"""Timing with planted times: the arithmetic, the order of turns, and workers that fail."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tx_export.errors import TxExportError
from tx_export.timing import Contender, Plan, Shape, Timing, compare, measure

_QUICK = Plan(pause=0.0, seconds=0.0, timeout=20.0)
_WORKER = """
import json, sys
name, log = sys.argv[1:]
seen = set()
for line in sys.stdin:
    question = json.loads(line)
    if "load" in question:
        answer = {"load_ms": 7.0, "provider": "stand-in"}
    else:
        shape = (question["time"]["batch"], question["time"]["tokens"])
        with open(log, "a") as file:
            file.write(f"{name} {shape[0]}x{shape[1]} {question['calls']}\\n")
        ms = [float(shape[1])] * question["calls"]
        if shape not in seen:
            ms[0] = 1000.0
        seen.add(shape)
        answer = {"ms": ms, "peak_rss_mb": 10.0 * len(seen)}
    print(json.dumps(answer), flush=True)
"""


def _stand_in(folder: Path, name: str, code: str = _WORKER) -> Contender:
    return Contender(name, (sys.executable, "-c", code, name, str(folder / "log")))


def _log(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "log").read_text(encoding="utf-8").splitlines()]


def _timing(*medians: float) -> Timing:
    rounds = tuple((median,) for median in medians)
    return Timing("a", "cpu", Shape(2, 50), rounds, first_ms=9.0, load_ms=1.0, peak_rss_mb=1.0)


def _nothing(line: str) -> None:
    pass


def test_percentiles_are_over_all_calls_and_medians_over_each_round() -> None:
    rounds = (tuple(range(1, 11)), tuple(range(11, 22)))  # 1..21: the middle is 11, and 5% of 20 steps is one step
    timing = Timing("a", "cpu", Shape(2, 55), rounds, first_ms=999.0, load_ms=1.0, peak_rss_mb=1.0)
    assert timing.p50_ms == 11
    assert timing.p95_ms == pytest.approx(20, rel=1e-12)  # one interpolation in float64
    assert list(timing.medians) == [5.5, 16]
    assert timing.spread == pytest.approx((16 - 5.5) / 10.75, rel=1e-12)
    assert timing.tokens_per_s == pytest.approx(2 * 55 / 0.011, rel=1e-12)


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio", "verdict"),
    [
        ((8, 8, 8, 8, 8), (10, 10, 10, 10, 10), 0.8, "faster"),
        ((10, 10, 10, 10, 10), (8, 8, 8, 8, 8), 1.25, "slower"),
        ((8, 8, 8, 8, 11), (10, 10, 10, 10, 10), 0.8, "within noise"),  # one round says otherwise
        ((10, 10, 10, 10, 7), (8, 8, 8, 8, 8), 1.25, "within noise"),
        ((9.9, 9.9, 9.9, 9.9, 9.9), (10, 10, 10, 10, 10), 0.99, "within noise"),  # 1% only
        ((8, 8, 8, 8), (10, 10, 10, 10), 0.8, "within noise"),  # four rounds agree by chance once in eight
        ((8, 16, 24, 32, 40), (10, 20, 30, 40, 50), 0.8, "faster"),  # the machine slows down; each round is fair
        ((10, 10, 10, 10, 10), (10, 10, 10, 10, 10), 1.0, "within noise"),
    ],
)
def test_a_difference_is_one_only_if_all_rounds_agree(
    ours: Sequence[float], theirs: Sequence[float], ratio: float, verdict: str
) -> None:
    found = compare(_timing(*ours), _timing(*theirs))
    assert found.ratio == pytest.approx(ratio, rel=1e-12)
    assert found.verdict == verdict


def test_contenders_take_turns_and_each_round_starts_with_the_next(tmp_path: Path) -> None:
    measure([_stand_in(tmp_path, name) for name in "abc"], [Shape(1, 4)], _nothing, _QUICK)
    turns = "".join(name for name, _, _ in _log(tmp_path))
    assert turns == "abc" + "abc" + "bca" + "cab" + "abc" + "bca"  # warm-up, then five rounds


def test_b177_the_first_call_of_a_shape_is_apart_from_the_median(tmp_path: Path) -> None:
    timings = measure([_stand_in(tmp_path, "a")], [Shape(1, 64), Shape(1, 16), Shape(2, 16)], _nothing, _QUICK)
    assert [timing.first_ms for timing in timings] == [1000.0] * 3
    assert [timing.p50_ms for timing in timings] == [16.0, 16.0, 64.0]  # smallest shape first
    assert [timing.p95_ms for timing in timings] == [16.0, 16.0, 64.0]
    assert [timing.peak_rss_mb for timing in timings] == [10.0, 20.0, 30.0]
    assert {timing.load_ms for timing in timings} == {7.0}


def test_quick_calls_are_repeated_until_a_round_is_long_enough(tmp_path: Path) -> None:
    plan = Plan(pause=0.0, seconds=0.1, timeout=20.0)
    (quick, slow) = measure([_stand_in(tmp_path, "a")], [Shape(1, 2), Shape(1, 50)], _nothing, plan)
    assert {len(calls) for calls in quick.rounds} == {50}  # 100 ms of 2 ms each
    assert {len(calls) for calls in slow.rounds} == {5}  # never fewer
    assert [calls for _, _, calls in _log(tmp_path)] == ["3"] + ["51"] * 5 + ["3"] + ["6"] * 5


def test_b177_a_worker_that_sleeps_on_a_new_shape_is_slow_in_its_first_call_only(tmp_path: Path) -> None:
    code = """
import time
from tx_export._bench_worker import Ready, serve
def prepare(batch, tokens):
    pending = [0.5]
    return lambda: time.sleep(pending.pop() if pending else 0)
serve(lambda what: Ready("stand-in", prepare))
"""
    timings = measure([_stand_in(tmp_path, "a", code)], [Shape(1, 16), Shape(1, 64)], _nothing, _QUICK)
    for timing in timings:
        assert timing.first_ms >= 500
        assert timing.p50_ms < 500  # the planted sleep is in none of the counted calls


def test_what_a_contender_prints_does_not_disturb_the_answers(tmp_path: Path) -> None:
    code = """
import os
from tx_export._bench_worker import Ready, serve
def load(what):
    print("a progress bar")
    os.system("echo a compiler")
    return Ready("stand-in", lambda batch, tokens: lambda: print("a call"))
serve(load)
"""
    (timing,) = measure([_stand_in(tmp_path, "a", code)], [Shape(1, 1)], _nothing, _QUICK)
    assert timing.provider == "stand-in"


_DIES = "import sys; sys.stdin.readline(); print('out of luck', file=sys.stderr); sys.exit(5)"
_RAISES = """
from tx_export._bench_worker import serve
def load(what):
    raise ValueError("no such weights\\nand more")
serve(load)
"""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (_DIES, r"^contender b ended with code 5: out of luck$"),
        ("raise SystemExit", r"^contender b ended with code 0: it said nothing$"),
        ("print('hello', flush=True); input()", r"^contender b answered 'hello', not JSON$"),
        (_RAISES, r"^contender b: ValueError: no such weights$"),
        ("import time; time.sleep(60)", r"^contender b: no answer in 1 s$"),
    ],
)
def test_a_contender_that_fails_is_named_with_what_it_said(tmp_path: Path, code: str, message: str) -> None:
    plan = Plan(pause=0.0, seconds=0.0, timeout=1.0 if "sleep" in code else 20.0)
    with pytest.raises(TxExportError, match=message):
        measure([_stand_in(tmp_path, "b", code)], [Shape(1, 4)], _nothing, plan)


def test_a_command_that_does_not_exist_is_an_error_that_names_it() -> None:
    with pytest.raises(TxExportError, match=r"^contender a: can't start /no/such/program: "):
        measure([Contender("a", ("/no/such/program",))], [Shape(1, 4)], _nothing, _QUICK)


@pytest.mark.parametrize("how", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_no_worker_behind(tmp_path: Path, how: type[BaseException]) -> None:
    code = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with open(sys.argv[2], "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
sys.stdin.readline()
print(json.dumps({"load_ms": 1.0, "provider": "stand-in"}), flush=True)
time.sleep(60)
"""

    def interrupt(line: str) -> None:
        if line.startswith("timing"):
            raise how

    with pytest.raises(how):
        measure([_stand_in(tmp_path, "a", code)], [Shape(1, 4)], interrupt, _QUICK)
    pids = [int(pid) for pid in (tmp_path / "log").read_text(encoding="utf-8").split()]
    assert len(pids) == 2
    assert _wait_for(lambda: not any(_is_running(pid) for pid in pids))


def _is_running(pid: int) -> bool:
    try:
        return " Z " not in (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8")
    except OSError:
        return False


def _wait_for(done: Callable[[], bool]) -> bool:
    for _ in range(200):
        if done():
            return True
        time.sleep(0.05)
    return False
