"""REPORT.md says in few rows what stands in the manifest."""

from __future__ import annotations

from typing import Any

from tx_export._report import report


def manifest(quantized: dict[str, Any]) -> dict[str, Any]:
    nothing = {"done": 0, "of": 0, "left": []}
    counted = {"fused": nothing, "quantized": nothing | {"multiply_adds": {}} | quantized, "pruned": nothing}
    plain = {
        "name": "mine", "task": "features", "source": "mine.py:net", "weights": "random seed 0", "opset": 18,
        "ir_version": 8, "min_onnxruntime": "1.14.0", "pipeline": "dynamic_int8", "text": None,
    }  # fmt: skip
    empty: dict[str, Any] = {"control_flow": {}, "kept_heads": {}, "batch_dependent": False}
    return plain | counted | empty | {"verification": {"passes": [], "overall": {"invariance": {}}}}


def weight(name: str, form: str, after: int, reason: str = "") -> dict[str, Any]:
    return {"name": name, "before": 4000, "after": after, "form": form} | ({"reason": reason} if reason else {})


def test_weights_whose_names_differ_in_numbers_stand_in_one_row_with_their_sums() -> None:
    stored = [weight(f"layer.{number}.up", "int8", 1100) for number in range(300)]
    stored += [weight("layer.300.up", "float32", 4000, "wide"), weight("head", "int4", 700)]
    rows = [line for line in report(manifest({"stored": stored})).splitlines() if line.startswith("|")][-4:]
    assert rows == [
        "| layer.*.up | 300 | int8 | 1,200,000 | 330,000 |  |",
        "| layer.300.up | 1 | float32 | 4,000 | 4,000 | wide |",
        "| head | 1 | int4 | 4,000 | 700 |  |",
        "| all | 302 |  | 1,208,000 | 334,700 |  |",
    ]


def test_what_was_left_for_one_reason_stands_in_one_line() -> None:
    left = [{"name": f"node_{number}", "reason": "its range"} for number in range(200)]
    text = report(manifest({"done": 1, "of": 202, "left": [*left, {"name": "softmax", "reason": "its range"}]}))
    assert "- quantized: 1 of 202\n  - left: 200 of node_* (its range)\n  - left: softmax (its range)\n" in text


def test_the_share_of_multiply_adds_is_told_and_what_is_not_counted() -> None:
    text = report(manifest({"multiply_adds": {"int8": 0.934, "float32": 0.066}}))
    assert "products with weights: 93.4% int8, 6.6% float32. Those of attention itself" in text
    assert "Multiply-adds" not in report(manifest({}))
