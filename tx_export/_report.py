"""REPORT.md: what was done and how far the result is from eager, for people."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["report"]


def report(manifest: Mapping[str, Any]) -> str:
    """REPORT.md: what was done and how far the result is from eager, for people."""
    lines = [
        f"# {manifest['name']}",
        "",
        f"{manifest['task']} from `{manifest['source']}`, weights: {manifest['weights']}.",
        f"Opset {manifest['opset']}, IR {manifest['ir_version']}, ONNX Runtime {manifest['min_onnxruntime']} or later.",
        f"Control flow: {', '.join(f'{count} {name}' for name, count in manifest['control_flow'].items())}.",
        "",
    ]
    if manifest["weights"].startswith("random"):
        lines += ["**The weights are random: predictions mean nothing.**", ""]
    if "generation" in manifest:
        cache = manifest["generation"]["cache"]
        subject = (
            "A continuation and the token that it begins with have"
            if cache["cross"]
            else "A text and its continuation have"
        )
        lines += [f"{subject} {cache['max_length']} tokens at most.", ""]
    elif manifest["text"] is not None:
        lines += [f"Text is cut at {manifest['text']['max_length']} tokens; `--json` marks a text that was cut.", ""]
    lines += [*_error_table(manifest["verification"]), *_divergence(manifest["verification"].get("divergence"))]
    return "\n".join([*lines, *_coverage(manifest), ""])


def _error_table(verification: Mapping[str, Any]) -> list[str]:
    rows = [
        "## Error behind each pass",
        "",
        "| pass | judged by | output | max abs | SQNR dB | least cosine | agreement |",
    ]
    rows.append("|---|---|---|---|---|---|---|")
    whole = [verification["whole"] | {"pass": "against the whole model"}] if "whole" in verification else []
    for record in (*verification["passes"], *whole):
        for name, metrics in record["outputs"].items():
            cells = [_number(metrics[key]) for key in ("max_abs", "sqnr_db", "cosine", "agreement")]
            rows.append(f"| {record['pass']} | {record['kind']}: {record['budget']} | {name} | {' | '.join(cells)} |")
    changes = verification["overall"]["invariance"]
    changed = ", ".join(f"{cause} {_number(value)}" for cause, value in changes.items())
    return [*rows, "", f"Largest change of an answer by padding or by mates in the batch: {changed}.", ""]


def _divergence(record: Mapping[str, Any] | None) -> list[str]:
    if record is None:
        return []
    equal = record["prompts"] - len(record["first"])
    lines = [f"Greedy text equals eager's for {equal} of {record['prompts']} prompts over {record['tokens']} tokens."]
    for item in record["first"]:
        lines.append(
            f"- prompt {item['prompt']} leaves it at token {item['token']}, by a margin of {item['margin']:.3g}"
        )
    return [*lines, ""]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _coverage(manifest: Mapping[str, Any]) -> list[str]:
    lines = ["## What was changed", ""]
    for subject in ("fused", "quantized", "pruned", "pruned_neurons", "pruned_weights"):
        counted = manifest.get(subject, {"of": 0})
        if counted["of"]:
            lines.append(f"- {subject.replace('_', ' ')}: {counted['done']} of {counted['of']}")
            for name, items in _grouped(counted["left"], ["reason"]):
                number = f"{len(items)} of " if "*" in name else ""
                lines.append(f"  - left: {number}{name} ({items[0]['reason']})")
    kept = [f"{layer}: {', '.join(map(str, heads)) or 'none'}" for layer, heads in manifest["kept_heads"].items()]
    lines += [f"- heads that each layer keeps: {'; '.join(kept)}"] if kept else []
    lines += [_recovery(manifest["recovered"])] if "recovered" in manifest else []
    lines += ["", f"Passes: `{manifest['pipeline']}`", "", *_weights(manifest["quantized"])]
    if manifest["batch_dependent"]:
        isa = ", ".join(manifest["verified_on"]["instruction_sets"]) or platform.machine()
        without = "run the products in an exact, slower form"
        if manifest.get("isa") == "avx2":
            without = "are what it is built for, and products are judged as they compute them"
        lines += [
            f"Verified on a CPU with {isa}. Activations get one scale for each batch, so an answer depends a little on",
            f"its mates in the batch (batch dependent); CPUs without VNNI {without}.",
            "",
        ]
    return lines


def _recovery(record: Mapping[str, Any]) -> str:
    before, after = (_number(record[when]["sqnr_db"]) for when in ("before", "after"))
    return (
        f"- recovered in {record['steps']} steps: from {before} to {after} dB beside the whole model, on "
        f"{record['text']['held_out']} lines held out"
    )


def _weights(quantized: Mapping[str, Any]) -> list[str]:
    shares = ", ".join(f"{100 * share:.3g}% {precision}" for precision, share in quantized["multiply_adds"].items())
    lines = []
    if shares:
        lines += [f"Multiply-adds of products with weights: {shares}. Those of attention itself, which grow with the"]
        lines += ["length, are not counted.", ""]
    stored = quantized.get("stored", [])
    if not stored:
        return lines
    lines += ["| weight | number | form | bytes before | bytes now | left because |", "|---|---|---|---|---|---|"]
    for name, items in [*_grouped(stored, ["form", "reason"]), ("all", stored)]:
        before, after = (sum(item[key] for item in items) for key in ("before", "after"))
        form, reason = (items[0].get(key, "") if items is not stored else "" for key in ("form", "reason"))
        lines.append(f"| {name} | {len(items)} | {form} | {before:,} | {after:,} | {reason} |")
    return [*lines, ""]


def _grouped(items: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Items whose names differ in numbers only and that agree in `keys`, under one name with * for the numbers."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for item in items:
        pattern = re.sub(r"\d+", "*", item["name"])
        groups.setdefault((pattern, *(item.get(key, "") for key in keys)), []).append(item)
    return [(key[0] if len({*map(_name, group)}) > 1 else _name(group[0]), group) for key, group in groups.items()]


def _name(item: Mapping[str, Any]) -> str:
    return str(item["name"])
