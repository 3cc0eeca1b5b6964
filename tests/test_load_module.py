"""Users' own modules: their inputs, outputs, weights and modes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tx_export.errors import LoadError, PluginError
from tx_export.load import load
from tx_export.spec import EagerModel

_USER = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)

    def forward(self, ids, mask):
        x = self.dropout(self.embedding(ids)) * mask[:, :, None]
        return {"hidden": x, "logits": self.head(x.sum(1)), "nothing": None}

class Fixed(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    def tx_inputs(self):
        return ["x:float32[rows,4]"]

instance = Net().train()
number = 3

def pair():
    return nn.ModuleList([nn.Linear(4, 2)])[0]

def wrong():
    return 3

def fails():
    raise ValueError("no weights")
"""
_INPUTS = ("ids:int64[batch,tokens<=9]", "mask:float32[batch,tokens<=9]")


def _state(model: EagerModel) -> dict[str, Tensor]:
    return dict(model.module.state_dict())


def _assert_same_weights(first: EagerModel, second: EagerModel) -> None:
    ours, theirs = _state(first), _state(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(_USER)
    return tmp_path / "mine.py"


def test_outputs_are_found_by_name_and_dimension(file: Path) -> None:
    model = load(f"{file}:Net", inputs=_INPUTS)
    assert (model.name, model.source, model.family) == ("Net", "mine.py:Net", "module")
    assert [str(spec) for spec in model.inputs] == [
        "ids:int64[batch,tokens<=9]{0..49}",
        "mask:float32[batch,tokens<=9]{0..1}",
    ]
    assert [str(spec) for spec in model.outputs] == ["hidden:float32[batch,tokens<=9,8]", "logits:float32[batch,3]"]
    out = model.module(torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2))
    assert [tuple(tensor.shape) for tensor in out] == [(1, 2, 8), (1, 3)]


def test_inputs_come_from_tx_inputs(file: Path) -> None:
    model = load(f"{file}:Fixed")
    assert [str(spec) for spec in model.inputs] == ["x:float32[rows,4]"]
    assert [str(spec) for spec in model.outputs] == ["output_0:float32[rows,2]"]


def test_inputs_come_from_the_files_tx_inputs(file: Path) -> None:
    file.write_text(_USER + '\ndef tx_inputs():\n    return ["x:float32[rows,4]"]\n')
    assert [str(spec) for spec in load(f"{file}:pair").inputs] == ["x:float32[rows,4]"]


def test_a_module_of_a_package_keeps_its_mode_and_weights(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    file.rename(file.parent / "users_own_package.py")
    model = load("users_own_package:instance", inputs=_INPUTS)
    theirs = sys.modules.pop("users_own_package").instance
    assert theirs.training and not model.module.training
    before = theirs.head.weight.clone()
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.zero_()
    assert torch.equal(theirs.head.weight, before)


def test_a_class_with_random_weights_is_the_same_each_time(file: Path) -> None:
    _assert_same_weights(load(f"{file}:Net", inputs=_INPUTS), load(f"{file}:Net", inputs=_INPUTS))


def test_a_weight_file_fills_the_module(file: Path, tmp_path: Path) -> None:
    weights = {"weight": torch.full((2, 4), 0.5), "bias": torch.zeros(2)}
    save_file(weights, tmp_path / "w.safetensors")
    model = load(f"{file}:Fixed", weights=str(tmp_path / "w.safetensors"))
    [found] = model.module(torch.ones(1, 4))
    assert torch.equal(found, torch.full((1, 2), 2.0))
    assert model.weights.startswith("checkpoint ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Net", "its inputs are not known; give each with --input"),
        ("number", "is int; expected an nn.Module"),
        ("wrong", "returned int; expected an nn.Module"),
        ("fails", "building it raised ValueError: no weights"),
    ],
)
def test_what_is_no_module_says_what_it_is(name: str, message: str, file: Path) -> None:
    with pytest.raises((LoadError, PluginError), match=message):
        load(f"{file}:{name}")


def test_a_module_that_fails_on_its_inputs_says_so(file: Path) -> None:
    with pytest.raises(LoadError, match=r"running it on inputs of shape \[2, 5\] raised RuntimeError: mat1"):
        load(f"{file}:Fixed", inputs=["x:float32[rows,5]"])
