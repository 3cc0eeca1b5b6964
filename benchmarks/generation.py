"""Prefill and decode speed of an artifact that generates, beside onnxruntime-genai on the same weights.

    python benchmarks/generation.py ARTIFACT [--genai FOLDER] [--python PYTHON] [--prompt 128] [--new 64]
                                             [--rounds 9] [--threads N] [--json FILE]

FOLDER is what `python -m onnxruntime_genai.models.builder -p int4 -e cpu` wrote; PYTHON is an interpreter that has
onnxruntime-genai, by default this one. Each contender has a process of its own and the same ids; rounds alternate, and
medians are shown. Both take the likeliest token and never end early. The thread count of both is set.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["main"]

Once = Callable[[list[int], int], tuple[float, float]]  # ids and new tokens -> seconds to the first, and for the others


def main() -> None:
    """Start a process for each contender, let them run in turn, and show the medians."""
    options = _parser().parse_args()
    if options.worker:
        _serve(_WORKERS[options.worker](str(options.artifact), options.threads))
        return
    ids = [(7919 * place) % 4000 + 100 for place in range(options.prompt)]
    commands = {"tx-export": [sys.executable, __file__, str(options.artifact), "--worker", "artifact"]}
    if options.genai is not None:
        commands["onnxruntime-genai"] = [options.python, __file__, str(options.genai), "--worker", "genai"]
    workers = {name: _Worker([*command, "--threads", str(options.threads)]) for name, command in commands.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for number in range(options.rounds + 1):
        # Who comes first in a round is 3% slower here, so they take turns.
        for name, worker in list(workers.items())[:: 1 if number % 2 else -1]:
            answer = worker.ask({"ids": ids, "new": options.new})
            if number:  # the first round warms up
                found[name].append(answer)
    rows = [{"contender": name, **_row(answers, options.new)} for name, answers in found.items()]
    for row in rows:
        print("  ".join(f"{key} {value:.1f}" if isinstance(value, float) else str(value) for key, value in row.items()))
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows, "threads": options.threads}, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, metavar="ARTIFACT")
    parser.add_argument("--genai", type=Path, metavar="FOLDER")
    parser.add_argument("--python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--worker", choices=sorted(_WORKERS), help=argparse.SUPPRESS)
    return parser


def _row(answers: list[dict[str, float]], new: int) -> dict[str, float]:
    first = statistics.median(answer["first"] for answer in answers)
    rest = statistics.median(answer["rest"] for answer in answers)
    peak = max(answer["peak_rss_mb"] for answer in answers)
    return {"prefill_ms": 1000 * first, "decode_tokens_per_s": (new - 1) / rest, "peak_rss_mb": peak}


class _Worker:
    """A process that answers a line of JSON with one."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def ask(self, question: dict[str, Any]) -> dict[str, float]:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a contender ended with exit code {self._process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found


def _serve(once: Once) -> None:
    print("{}", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        first, rest = once(question["ids"], question["new"])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"first": first, "rest": rest, "peak_rss_mb": peak}), flush=True)


def _artifact(folder: str, threads: int) -> Once:
    """The copy of our runtime in the artifact, as somebody without tx-export uses it."""
    sys.path.insert(0, folder)
    import generate  # type: ignore[import-not-found]
    import run  # type: ignore[import-not-found]

    model = run.Model(folder, threads=threads)
    generator = generate.Generator(model._sessions.by_name(threads), model.manifest["generation"] | {"eos": []})

    def once(ids: list[int], new: int) -> tuple[float, float]:
        times: list[float] = []
        start = time.perf_counter()
        generator.generate([ids], generate.Options(max_new_tokens=new), lambda row, tokens: _note(times))
        generator.generate([[1]], generate.Options(max_new_tokens=1))  # forget, so that the next prompt is read whole
        return times[0] - start, times[-1] - times[0]

    return once


def _note(times: list[float]) -> bool:
    times.append(time.perf_counter())
    return False


def _genai(folder: str, threads: int) -> Once:
    import onnxruntime_genai as genai  # type: ignore[import-not-found]

    config = genai.Config(folder)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = genai.Model(config)
    tokenizer = genai.Tokenizer(model)  # as our runtime has one

    def once(ids: list[int], new: int) -> tuple[float, float]:
        params = genai.GeneratorParams(model)
        params.set_search_options(min_length=len(ids) + new, max_length=len(ids) + new, do_sample=False)
        start = time.perf_counter()
        generator = genai.Generator(model, params)
        generator.append_tokens(ids)
        generator.generate_next_token()
        first = time.perf_counter()
        for _ in range(new - 1):
            generator.generate_next_token()
        rest = time.perf_counter() - first
        tokenizer.decode(generator.get_sequence(0))
        return first - start, rest

    return once


_WORKERS: dict[str, Callable[[str, int], Once]] = {"artifact": _artifact, "genai": _genai}


if __name__ == "__main__":
    main()
