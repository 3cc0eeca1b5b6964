"""A forward that writes to its module: harmless notes are allowed, memory is refused, tables are grown once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.spec import EagerModel

_HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.last, self.log, self.seen = 0, None, [], {}
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.table = self.grown(3)
    def grown(self, n):
        return torch.arange(n)[:, None] * torch.tensor([0.1, 0.2, 0.3, 0.4])
    def forward(self, x):
"""
_BOUNDED = "x:float32[batch,tokens<=64,4]"


def _loaded(tmp_path: Path, body: str, spec: str = _BOUNDED) -> EagerModel:
    (tmp_path / "mine.py").write_text(_HEAD + "".join(f"        {line}\n" for line in body.splitlines()))
    return load(f"{tmp_path / 'mine.py'}:Net", inputs=[spec])


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("self.mean.mul_(0.9).add_(x.mean((0, 1)))\nreturn x - self.mean", "mean"),
        ("self.mean = self.mean + x.mean((0, 1))\nreturn x - self.mean", "mean"),
        ("self.mean.data += 1\nreturn x - self.mean", "mean"),
        ("self.calls += 1\nreturn x * self.calls", "calls"),
        ("self.log.append(1)\nreturn x * len(self.log)", "log"),
        ("with torch.no_grad():\n    self.part[0].weight += 1\nreturn self.part[0](x)", "part.0.weight"),
        ("out = x if self.last is None else x + self.last.mean()\nself.last = x\nreturn out", "last"),
    ],
)
def test_a_forward_whose_answers_depend_on_earlier_runs_is_refused(body: str, names: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="it answers differently when it is run again .*forward changes .*" + names):
        _loaded(tmp_path, body)


@pytest.mark.parametrize("body", ["return F.dropout(x, 0.5)", "return x + torch.randn_like(x)"])
def test_random_numbers_in_eval_mode_are_refused(body: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"answers differently .*\(random numbers in forward\?\)"):
        _loaded(tmp_path, body)


def test_notes_that_forward_takes_are_gone_after_each_run(tmp_path: Path) -> None:
    model = _loaded(
        tmp_path,
        "self.calls += 1\nself.count += 1\nself.log.append(x.shape)\nself.seen[x.shape] = x\nself.last = x * 2\n"
        "self.new = x\nreturn x",
    )
    users = vars(model.module.get_submodule("module"))
    for _ in range(2):
        [found] = model.module(torch.ones(1, 2, 4))
        assert torch.equal(found, torch.ones(1, 2, 4))
    assert [users["calls"], users["_buffers"]["count"], users["log"], users["seen"], users["last"]] == [
        0,
        0,
        [],
        {},
        None,
    ]
    assert "new" not in users


_GROWS = (
    "if x.shape[1] > len(self.table):\n    self.table = self.grown(x.shape[1])\nreturn x + self.table[: x.shape[1]]"
)


def test_a_table_that_forward_grows_is_grown_to_the_bound_b042(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _loaded(tmp_path, _GROWS)
    assert vars(model.module.get_submodule("module"))["table"].shape == (64, 4)
    assert "table had to grow to the largest inputs" in caplog.text
    for tokens in (8, 16, 64):
        [found] = model.module(torch.zeros(1, tokens, 4))
        # Reference: the user's formula.
        assert torch.equal(found[0], torch.arange(tokens)[:, None] * torch.tensor([0.1, 0.2, 0.3, 0.4]))


def test_a_table_that_grows_without_bound_is_refused_b042(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"forward grows table with its inputs; give every dimension a bound"):
        _loaded(tmp_path, _GROWS, "x:float32[batch,tokens,4]")


def test_a_constant_that_is_made_once_is_kept(tmp_path: Path) -> None:
    body = "if self.last is None:\n    self.last = torch.ones(4) * 3\nreturn x * self.last"
    model = _loaded(tmp_path, body, "x:float32[batch,tokens,4]")
    assert vars(model.module.get_submodule("module"))["last"].tolist() == [3.0] * 4
