"""What the linter says: for each kind of fault its severity, what happens and what to write instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tx_export._lint_frames import Place

__all__ = ["Finding", "finding"]

Severity = Literal["error", "warning"]

# What happens, with {code} the user's expression and {detail} what was found out about it; and the remedy.
_RULES: dict[str, tuple[Severity, str, str]] = {
    "train-mode": (
        "warning",
        "{module} stays in train mode, which its eval() should end; it is compiled as it is in eval mode",
        "let its train() set `training`",
    ),
    "frozen-dimension": (
        "error",
        "`{code}` makes a constant of the dimension {detail}",
        "use the size as it is (// for int and /, no float, range or math), or declare the dimension as a number",
    ),
    "shape-branch": (
        "warning",
        "`{code}` asks for the dimension {detail} once, while exporting, and the graph keeps the answer for every size",
        "compute it without a branch, or declare a bound within which one side always holds",
    ),
    "data-branch": (
        "error",
        "`{code}` needs the values of a tensor in Python, which a graph can't give",
        "compute both sides and choose with torch.where, or leave the branch out",
    ),
    "data-value": ("warning", "`{code}` reads a number out of a tensor", "keep it a tensor"),
    "data-shape": (
        "warning",
        "`{code}` has a shape that depends on values",
        "multiply by a mask, or choose with torch.where, which keep the shape",
    ),
    "state": (
        "warning",
        "forward changes {detail}; an artifact changes nothing and answers as the module does at first",
        "compute it in __init__, or keep it in a local variable",
    ),
    "complex": (
        "warning",
        "`{code}` computes with complex numbers{detail}, which a graph holds as pairs of real ones, for few operators",
        "write the real form (cos and sin of the angle, applied to the two halves)",
    ),
    "large-fill": (
        "warning",
        "`{code}` uses a number that float16 can't hold",
        "use torch.finfo(x.dtype).min, which fits every dtype",
    ),
    "nan": (
        "error",
        "`{code}` gives NaN where a row of the mask is empty",
        "fill with torch.finfo(x.dtype).min instead of -inf, which softmax turns into finite weights",
    ),
    "nan-weights": (
        "error",
        "`{code}` gives NaN where a row of the mask is empty",
        "pass need_weights=False, with which such a row gets zeros, or a float mask of finite numbers",
    ),
    "unsupported": (
        "error",
        "`{code}` needs {detail}, for which the exporter has no ONNX operators",
        "write it with operators that ONNX has",
    ),
    "foreign": (
        "error",
        "`{code}` becomes {detail}, an operator that ONNX Runtime has not without a library of its own",
        "write it with operators of torch",
    ),
    "failed": ("error", "`{code}` can't be exported: {detail}", "write it another way"),
    "random": (
        "error",
        "`{code}` draws random numbers in eval mode ({detail})",
        "pass training=self.training, so that it stops in eval mode",
    ),
}


@dataclass(frozen=True)
class Finding:
    """A fault, the user's line that has it, and what to write instead; an error is what no export gets right."""

    kind: str
    file: str
    line: int
    message: str
    remedy: str
    severity: Severity

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}; {self.remedy}"


def finding(kind: str, place: Place, detail: str = "") -> Finding:
    """The rule of a kind, told of a place."""
    severity, message, remedy = _RULES[kind]
    text = message.format(code=place.code, module=place.module, detail=detail)
    where = "" if "{module}" in message else f"in {place.module}: "
    return Finding(kind, place.file, place.line, where + text, remedy, severity)
