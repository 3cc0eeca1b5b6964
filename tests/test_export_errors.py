"""Exports that fail: one line with the module, the user's file and line and the remedy; torch's text in a log."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from tx_export.errors import ExportError
from tx_export.export import Target, export
from tx_export.load import load

_USERS = """\
import torch
from torch import nn

@torch.library.custom_op("acme::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3

@cube.register_fake
def _(x):
    return torch.empty_like(x)

class Unsupported(nn.Module):
    def forward(self, x):
        return cube(x)

class Frozen(nn.Module):
    def forward(self, x):
        return x / int(x.shape[1])

class BatchFrozen(nn.Module):
    def forward(self, x):
        return torch.stack([row * 2 for row in x])

class Foreign(nn.Module):
    def forward(self, x):
        if not torch.onnx.is_in_onnx_export():
            return x
        return torch.onnx.ops.symbolic("acme::Cube", (x,), dtype=x.dtype, shape=x.shape, version=1)

class Complex(nn.Module):
    def forward(self, x):
        z = torch.view_as_complex(x.reshape(*x.shape[:2], 4, 2))
        return torch.view_as_real(z.exp()).flatten(2)

class Branch(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x

class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), layer])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def frozen(): return Net(Frozen())
def batch_frozen(): return Net(BatchFrozen())
def unsupported(): return Net(Unsupported())
def foreign(): return Net(Foreign())
def complex_numbers(): return Net(Complex())
def branch(): return Net(Branch())
"""


def _line(text: str) -> int:
    return next(number for number, line in enumerate(_USERS.splitlines(), 1) if text in line)


# The function of the user's file, the line at fault, and what the message says of it.
_FAULTS = {
    "B030: a size made a number": ("frozen", "int(x.shape[1])", "makes a constant of the dimension 'tokens' ("),
    "B021: rows looped over": ("batch_frozen", "for row in x", "makes a constant of the dimension 'batch' ("),
    "B261: an operator without a rule": ("unsupported", "return cube(x)", "needs acme::cube, for which"),
    "B078: an operator of a foreign domain": ("foreign", '"acme::Cube"', "operator 'Cube' of domain 'acme'"),
    "B047: complex numbers": ("complex_numbers", "z.exp()", "(aten::exp), which a graph holds as pairs of real ones"),
    "B008: a branch on values": ("branch", "x.sum() > 0", "needs the values of a tensor in Python"),
}


@pytest.mark.parametrize("name", _FAULTS)
def test_a_failed_export_is_one_line_with_module_file_line_and_remedy_and_a_log_of_the_rest(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, at, what = _FAULTS[name]
    path = tmp_path / "users.py"
    path.write_text(_USERS, encoding="utf-8")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = load(f"{path}:{function}", inputs=["x:float32[batch,tokens<=64,8]"])
    with pytest.raises(ExportError) as caught:
        export(model, Target.parse(None, "fused"))
    message = str(caught.value)
    assert message.startswith(f"users.py:{function}: {path}:{_line(at)}: in layers.1: `") and "\n" not in message
    assert what in message
    logs = list(tmp_path.glob("tx-export-*.log"))
    assert [str(log) for log in logs] == re.findall(r"own words: (.*)\)$", message)
    assert all("Traceback" in log.read_text(encoding="utf-8") for log in logs)
    assert bool(logs) == (caught.value.__cause__ is not None)  # torch raised nothing where it froze or emitted silently
