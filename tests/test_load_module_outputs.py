"""What a user's forward may return, and what its outputs are called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.spec import EagerModel

_HEAD = """
import dataclasses
from collections import OrderedDict
from typing import NamedTuple
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

class Pair(NamedTuple):
    left: object
    right: object

@dataclasses.dataclass
class Result:
    logits: object
    hidden: object = None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))
    def forward(self, x, mask):
        y = x * mask
        return """


def _loaded(tmp_path: Path, result: str, *inputs: str) -> EagerModel:
    (tmp_path / "mine.py").write_text(_HEAD + result + "\n")
    return load(f"{tmp_path / 'mine.py'}:Net", inputs=inputs or ("x:float32[b,t<=9]", "mask:float32[b,t<=9]"))


@pytest.mark.parametrize(
    ("result", "names"),
    [
        ("y", ["output_0"]),
        ("(y,)", ["output_0"]),
        ("[y, y + 1]", ["output_0", "output_1"]),
        ("y, None, y + 1", ["output_0", "output_2"]),
        ("{'logits': y, 'aux': y + 1}", ["logits", "aux"]),
        ("OrderedDict(z=y, a=y + 1)", ["z", "a"]),
        ("Pair(y, y + 1)", ["left", "right"]),
        ("Result(y)", ["logits"]),
        (
            "BaseModelOutput(last_hidden_state=y, hidden_states=(y, y + 1))",
            ["last_hidden_state", "hidden_states.0", "hidden_states.1"],
        ),
        ("{'enc': Pair(y, [y, {'deep': y}]), 1: y}", ["enc.left", "enc.right.0", "enc.right.1.deep", "1"]),
        ("((y, y), y)", ["output_0.0", "output_0.1", "output_1"]),
        ("{'a b/c!': y}", ["a b/c!"]),
    ],
)
def test_outputs_are_named_by_the_keys_that_lead_to_them(result: str, names: list[str], tmp_path: Path) -> None:
    model = _loaded(tmp_path, result)
    assert [str(spec) for spec in model.outputs] == [f"{name}:float32[b,t<=9]" for name in names]
    x, mask = torch.ones(2, 4), torch.ones(2, 4)
    assert [tensor.shape for tensor in model.module(x, mask)] == [(2, 4)] * len(names)


def test_what_is_no_tensor_is_dropped_with_one_notice_b225(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = _loaded(
        tmp_path, "{'logits': y, 'aux': None, 'n': 3, 'mask': mask, 'const': self.table, 'kind': Pair('a', y)}"
    )
    assert [spec.name for spec in model.outputs] == ["logits", "mask_out", "const", "kind.right"]
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "dropped, as they are no tensors: aux (None), n (int), kind.left (str)",
        "outputs with a name of their own: 'mask' is called 'mask_out'",
        "outputs that are an input as it is: 'mask_out' is 'mask'",
        "outputs that are the same whatever the inputs hold: 'const'",
    ]


@pytest.mark.parametrize(
    ("result", "names"),
    [
        ("{'x': y, 'x_out': y}", ["x_out", "x_out_"]),
        ("{'a.b': y, 'a': {'b': y}}", ["a.b", "a.b_"]),
        ("{'': y, 'y': y}", ["output_0", "y"]),
    ],
)
def test_names_that_collide_are_made_different(result: str, names: list[str], tmp_path: Path) -> None:
    assert [spec.name for spec in _loaded(tmp_path, result).outputs] == names


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("{'a': None, 'b': 3}", "forward returns no tensor; expected at least one"),
        ("()", "forward returns no tensor; expected at least one"),
        ("None", "returned NoneType; expected a tensor, or a tuple, dict or dataclass of tensors"),
        ("(t for t in [y])", "returned generator; expected a tensor"),
        ("{'z': torch.complex(y, y)}", "output 'z' is complex64; ONNX Runtime gives dense tensors of bool, "),
        ("{'z': y.to_sparse()}", "output 'z' is torch.sparse_coo; ONNX Runtime gives dense tensors"),
        ("y if len(y) == 2 else y[0]", "output 'output_0' has 2 dimensions, and 1 for larger inputs"),
        ("{'a': y, 'b': y} if len(y) == 2 else {'a': y}", "forward returned no tensor b, which it did on other inputs"),
    ],
)
def test_what_is_no_output_says_what_it_is(result: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=message):
        _loaded(tmp_path, result)


@pytest.mark.parametrize(
    ("result", "dims"),
    [
        ("y.mT", "[t<=9,b]"),
        ("y[:, 1:]", "[b,output_0_1]"),
        ("torch.cat([y, y], 1)", "[b,output_0_1]"),
        ("y.sum(0)", "[t<=9]"),
        ("y.sum()", "[]"),
        ("y[:, :1].expand(-1, 7)", "[b,7]"),
        ("{'a b': torch.cat([y, y])}", "[a_b_0,t<=9]"),
    ],
)
def test_an_axis_that_follows_no_input_gets_a_name_of_its_own(result: str, dims: str, tmp_path: Path) -> None:
    [output] = _loaded(tmp_path, result).outputs
    assert str(output).partition("[")[2] == dims[1:]


@pytest.mark.parametrize("bounds", [("", ""), ("<=2", "<=3"), ("<=3", "<=2"), ("<=1", "<=2"), ("<=5", "<=5")])
def test_dimensions_with_small_bounds_are_told_apart(bounds: tuple[str, str], tmp_path: Path) -> None:
    shape = "[b{},t{}]".format(*bounds)
    [output] = _loaded(tmp_path, "y", f"x:float32{shape}", f"mask:float32{shape}").outputs
    assert str(output) == f"output_0:float32{shape}".replace("b<=1", "1")


def test_a_shorter_axis_is_not_taken_for_another_dimension(tmp_path: Path) -> None:
    [output] = _loaded(tmp_path, "y[:, 1:]", "x:float32[b<=2,t<=3]", "mask:float32[b<=2,t<=3]").outputs
    assert str(output) == "output_0:float32[b<=2,output_0_1]"
