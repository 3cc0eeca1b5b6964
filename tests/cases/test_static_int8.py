"""Cases of calibrated int8: what answers depend on, memory, texts of any kind, a build that repeats without text."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tx_export import runtime
from tx_export._judged_passes import context_of
from tx_export.artifact import open_graph
from tx_export.compiler import BuildOptions, build, compare
from tx_export.errors import PassError
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.metrics import Budget, Meter, fidelity_bound
from tx_export.optimize.fold_constants import FoldConstants
from tx_export.optimize.pack_qkv import PackQkv
from tx_export.passes import Coverage, Outcome
from tx_export.providers.cpu import Cpu
from tx_export.quantize.static_int8 import StaticInt8
from tx_export.spec import EagerModel
from tx_export.verify import default_lines, split_lines, text_feeds

from .models import build_from

Feeds = dict[str, np.ndarray]
_CHOOSING, _JUDGING = split_lines(default_lines())


@pytest.fixture(scope="module")
def classifier(cls_weights: Path) -> EagerModel:
    return load("classifier", weights=str(cls_weights))


@pytest.fixture(scope="module")
def exported(classifier: EagerModel) -> onnx.ModelProto:
    graph = export(classifier, Target.parse(None, "fused"))
    for item in (FoldConstants(), PackQkv()):
        item(graph)
    return ir.to_proto(graph)


def quantized(model: EagerModel, exported: onnx.ModelProto, lines: Sequence[str]) -> tuple[ir.Model, Coverage]:
    graph = ir.from_proto(exported)
    outcome = StaticInt8(context=context_of(model, lines, "cpu"))(graph)
    assert isinstance(outcome, Outcome)
    return graph, outcome.coverage


@pytest.fixture(scope="module")
def static(classifier: EagerModel, exported: onnx.ModelProto) -> ir.Model:
    return quantized(classifier, exported, _CHOOSING)[0]


def logits(graph: ir.Model, feeds: Sequence[Feeds]) -> np.ndarray:
    run = open_graph(graph, Cpu().session(), threads=1)
    return np.concatenate([run(each)["logits"] for each in feeds])


def ratio(model: EagerModel, exported: onnx.ModelProto, graph: ir.Model) -> float:
    """In dB, from the graph before quantization, on text that no range comes from."""
    feeds, meter = text_feeds(model, _JUDGING), Meter()
    meter.add(logits(ir.from_proto(exported), feeds), logits(graph, feeds))
    return meter.result().sqnr_db


def drawn(batch: int, tokens: int) -> Feeds:
    ids = np.random.default_rng(0).integers(5, 999, (batch, tokens))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def test_b110_batch_mates_change_nothing(static: ir.Model) -> None:
    feeds = drawn(8, 16)
    alone = logits(static, [{name: array[:1] for name, array in feeds.items()}])
    # Integers are exact and rows are computed one by one: the difference is none, of loud mates too.
    feeds["input_ids"][1:] = np.random.default_rng(1).integers(5, 999, (7, 16))
    assert np.array_equal(logits(static, [feeds])[:1], alone)
    feeds["input_ids"][7] = 999
    assert np.array_equal(logits(static, [feeds])[:1], alone)


def test_b111_padding_changes_no_more_than_in_fp32(static: ir.Model, exported: onnx.ModelProto) -> None:
    ids = drawn(20, 16)["input_ids"]
    found: dict[str, list[np.ndarray]] = {"static": [], "fp32": []}
    for tokens in (16, 64, 128):
        feeds = {name: np.zeros((20, tokens), np.int64) for name in ("input_ids", "attention_mask")}
        feeds["input_ids"][:, :16], feeds["attention_mask"][:, :16] = ids, 1
        found["static"].append(logits(static, [feeds]))
        found["fp32"].append(logits(ir.from_proto(exported), [feeds]))
    for name, (first, *others) in found.items():
        moved = np.max([np.abs(other - first).max(axis=1) for other in others], axis=0)
        # Sums in attention may come in another order, as in fp32; where that puts a number on the other side of a step
        # of 8 bits, an answer moves by what the step counts. One text in ten may have such a number.
        assert (moved <= fidelity_bound(float(np.abs(first).max()))).mean() >= 0.9, name


def test_batches_and_order_of_the_text_are_no_part_of_the_ranges(
    classifier: EagerModel, exported: onnx.ModelProto
) -> None:
    context, found = context_of(classifier, _CHOOSING, "cpu"), []
    single = [{name: array[i : i + 1] for name, array in each.items()} for each in context.feeds for i in range(8)]
    for feeds in (context.feeds, context.feeds[::-1], [each for each in single if len(each["input_ids"])]):
        outcome = StaticInt8(method="minmax", context=dataclasses.replace(context, feeds=feeds))(
            ir.from_proto(exported)
        )
        assert isinstance(outcome, Outcome)
        (repeat,) = outcome.coverage.repeat
        assert isinstance(repeat, StaticInt8)
        found.append([float(end) for item in repeat.ranges.split() for end in item.split(":")[1:]])
    # Eager's own values move by rounding when the batch does: 3e-6 of the largest, as fidelity allows.
    assert np.array_equal(found[0], found[1])
    assert np.abs(np.subtract(found[0], found[2])).max() <= fidelity_bound(float(np.abs(found[0]).max()))


_TEXTS = {
    "fewer lines than a batch": _CHOOSING[:3],
    "lines over the limit": [line * 40 for line in _CHOOSING[:8]],
    "one outlier among them": [*_CHOOSING, "!" * 500],
    "lines of one token and of none": [*_CHOOSING, "a", ""],
}


@pytest.mark.parametrize("kind", _TEXTS)
def test_any_text_gives_ranges_within_the_budget(kind: str, classifier: EagerModel, exported: onnx.ModelProto) -> None:
    graph, coverage = quantized(classifier, exported, _TEXTS[kind])
    assert coverage.done == coverage.of > 0
    limit = Budget.parse(StaticInt8.budget or "").sqnr_db
    assert limit is not None and ratio(classifier, exported, graph) >= limit


def test_without_a_tokenizer_the_error_says_what_to_do(classifier: EagerModel, exported: onnx.ModelProto) -> None:
    arrays_only = dataclasses.replace(classifier, text=None)
    with pytest.raises(
        PassError, match=r"^calibration needs text, and the model takes arrays only; give it a tokenizer"
    ):
        quantized(arrays_only, exported, _CHOOSING)


def test_a_build_holds_its_ranges_so_that_its_passes_make_the_same_file_from_any_text(
    cls_weights: Path, tmp_path: Path
) -> None:
    first = build_from(cls_weights, tmp_path / "first", "static_int8")
    manifest = runtime.read_manifest(first)
    assert manifest["batch_dependent"] is False and manifest["verification"]["overall"]["kind"] == "drift"
    assert {item["form"] for item in manifest["quantized"]["stored"]} >= {"int8"}
    assert compare(first, str(cls_weights))["verdict"] == "pass"
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{'a' * length} text\n" for length in range(1, 12)), encoding="utf-8")
    second = build(
        BuildOptions(
            source="classifier",
            weights=str(cls_weights),
            passes=manifest["pipeline"],
            calibrate=other,
            output=tmp_path / "second",
            budget="sqnr_db=1",
        )
    )
    assert (first / "model.onnx").read_bytes() == (second / "model.onnx").read_bytes()


_MEASURE = """
import json, resource, sys
import numpy as np
from torch import nn
from tests.quantize.graphs import graph
from tx_export._judged_passes import context_of
from tx_export.quantize.static_int8 import StaticInt8
from tx_export.spec import TextSpec
from tx_export.testing import eager_model, tiny_tokenizer

random = np.random.default_rng(0)
shapes = {"table": (128, 256), "w": (256, 256), "v": (256, 8)}
weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
body = "x = Gather (table, input_ids) h = MatMul (x, w) r = Relu (h) y = MatMul (r, v)"
inputs = [f"{name}:int64[batch,tokens<=32]{{0..{high}}}" for name, high in (("input_ids", 127), ("attention_mask", 1))]
model = eager_model(nn.Identity(), inputs, ["y:float32[batch,tokens,8]"], text=TextSpec(tiny_tokenizer(), 32))
peaks = []
for count in (100, 10_000):
    lines = [" ".join("abcdefgh"[: n % 7 + 1] for n in random.integers(0, 99, 4)) for _ in range(count)]
    context = context_of(model, lines, "cpu")
    for method in ("minmax", "mse"):
        made = graph("int64[b, t] input_ids, int64[b, t] attention_mask", "float[b, t, 8] y", weights, body)
        assert StaticInt8(method=method, context=context)(made).coverage.done == 3
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(json.dumps(peaks))
"""


def test_b124_memory_of_a_calibration_with_10_000_texts_is_that_with_100() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True, cwd=root)
    few, many = json.loads(done.stdout)
    # What the products of 10,000 texts of ten tokens and more read is over 200 MB; a process starts with about 400.
    assert many <= 1.2 * few
