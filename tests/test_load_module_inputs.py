"""How declared inputs reach a user's forward: by name, by position, of any dtype, in their ranges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.spec import EagerModel

_HEAD = "import torch\nfrom torch import nn\nclass Net(nn.Module):\n"
_LONG = "input_ids, attention_mask=None, token_type_ids=None, labels=None, return_dict=True"


def _loaded(tmp_path: Path, body: str, *inputs: str) -> EagerModel:
    """`body` is that of the class."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (tmp_path / "mine.py").write_text(_HEAD + lines)
    return load(f"{tmp_path / 'mine.py'}:Net", inputs=inputs)


def _forward(signature: str, result: str) -> str:
    return f"def forward(self, {signature}):\n    return {result}"


@pytest.mark.parametrize(
    ("signature", "names"),
    [
        ("a, b=None, c=None", "abc"),
        ("a, b=None, c=None", "cab"),
        ("a, c, *, b=None, d=2.0", "abc"),
        ("*, c, b, a", "abc"),
        ("c, **kwargs", "cab"),
        ("**kwargs", "bca"),
        ("z=None, c=None, b=None, y=None, a=None", "abc"),
    ],
)
def test_inputs_reach_the_parameters_of_their_names_in_any_order(signature: str, names: str, tmp_path: Path) -> None:
    own = signature.partition("**")[0]
    values = ", ".join(name if name in own else f"kwargs.get('{name}')" for name in "abc")
    body = _forward(signature, f"sum(k * x for k, x in zip((1, 10, 100), ({values})) if x is not None)")
    model = _loaded(tmp_path, body, *(f"{name}:float32[rows]" for name in names))
    given = {"a": torch.ones(2), "b": torch.full((2,), 2.0), "c": torch.full((2,), 3.0)}
    [found] = model.module(*(given[name] for name in names))
    assert found.tolist() == [321.0, 321.0]


@pytest.mark.parametrize("signature", ["a, b", "*arrays", "a, *arrays", "a, b=None, scale=1.0", "a, b, /"])
def test_inputs_of_other_names_go_by_position(signature: str, tmp_path: Path) -> None:
    result = {"*arrays": "arrays[0] - arrays[1]", "a, *arrays": "a - arrays[0]"}.get(signature, "a - b")
    model = _loaded(tmp_path, _forward(signature, result), "left:float32[rows]", "right:float32[rows]")
    [found] = model.module(torch.full((2,), 5.0), torch.full((2,), 3.0))
    assert found.tolist() == [2.0, 2.0]


def test_a_mixture_of_names_goes_by_position_with_a_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _loaded(tmp_path, _forward(_LONG, "input_ids + attention_mask"), "input_ids:int64[b]", "mask:int64[b]")
    assert "forward has no mask: inputs go by position" in caplog.text


@pytest.mark.parametrize(
    ("signature", "names", "reason"),
    [
        (_LONG, "attention_mask", "input_ids is missing"),
        (_LONG, "attention_mask ids", "neither the names nor the number fits"),
        (_LONG, "a b c d e f", "neither the names nor the number fits"),
        ("x, *, scale", "x", "scale is missing"),
        ("*arrays, scale=None", "x scale", "neither the names nor the number fits"),
        ("x: 'torch.Tensor'", "x y", "neither the names nor the number fits"),
    ],
)
def test_inputs_that_do_not_fit_are_shown_forwards_signature(
    signature: str, names: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=r"mine.py:Net: the inputs .* don't fit forward\(") as caught:
        _loaded(tmp_path, _forward(signature, "x"), *(f"{name}:int64[b]" for name in names.split()))
    shown = signature.replace(": 'torch.Tensor'", "")
    assert str(caught.value).endswith(f"don't fit forward({shown}): {reason}")


def test_optional_inputs_that_are_not_declared_keep_their_defaults(tmp_path: Path) -> None:
    result = "input_ids + token_type_ids if attention_mask is labels is None and return_dict else 0"
    model = _loaded(tmp_path, _forward(_LONG, result), "token_type_ids:int64[b]", "input_ids:int64[b]")
    [found] = model.module(torch.tensor([1]), torch.tensor([10]))
    assert found.tolist() == [11]


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "bool"]
)
def test_inputs_of_any_dtype(dtype: str, tmp_path: Path) -> None:
    result = "{'same': x, 'number': x.float() * scale, 'half': x.to(torch.bfloat16)}"
    model = _loaded(tmp_path, _forward("x, scale", result), f"x:{dtype}[b,3]", "scale:float32[]{0.5..2}")
    assert [str(spec) for spec in model.outputs] == [
        f"same:{dtype}[b,3]",
        "number:float32[b,3]",
        "half:float32[b,3]",  # NumPy has no bfloat16
    ]


def test_integers_without_a_range_are_ids_of_the_embedding_that_reads_them(tmp_path: Path) -> None:
    body = (
        "def __init__(self):\n"
        "    super().__init__()\n"
        "    self.words, self.kinds, self.places = nn.Embedding(70, 4), nn.Embedding(2, 4), nn.Embedding(9, 4)\n"
        "def forward(self, ids, kinds, other, mask):\n"
        "    places = torch.arange(ids.shape[1])\n"
        "    words = self.words(ids.long()) * mask[..., None]\n"
        "    return words + self.kinds(kinds) + self.places(places) + other[..., None]"
    )
    tensor = "{}:{}[b,tokens<=9]"
    inputs = [tensor.format(*pair) for pair in (("ids", "int32"), ("kinds", "int64"), ("other", "int64"))]
    model = _loaded(tmp_path, body, *inputs, tensor.format("mask", "bool"))
    assert [(spec.low, spec.high) for spec in model.inputs] == [(0, 69), (0, 1), (0, 1), (0, 1)]
    given = _loaded(tmp_path, body, "ids:int64[b,tokens<=9]{3..7}", *inputs[1:], tensor.format("mask", "bool"))
    assert (given.inputs[0].low, given.inputs[0].high) == (3, 7)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("[]", r"tx_inputs\(\) returned no inputs"),
        ("'x:float32[b]'", r"tx_inputs\(\) returned 'x:float32\[b\]'; expected a list of input texts"),
        ("['x:float32[b]'] * 2", "inputs are declared twice: x"),
        ("['x:bfloat16[b]']", "input 'x': 'bfloat16' is not a"),
        ("1 / 0", r"mine.py:\d+: .*tx_inputs\(\) raised ZeroDivisionError"),
    ],
)
def test_inputs_that_are_declared_wrongly(texts: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=message):
        _loaded(tmp_path, _forward("x, y=None", "x") + f"\ndef tx_inputs(self):\n    return {texts}")


def test_an_input_that_changes_nothing_is_kept_and_named_b008(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = _loaded(
        tmp_path, _forward("x, mask, y", "x + 0 * y"), "x:float32[b,t]", "mask:int64[b,t]", "y:float32[b,t]"
    )
    assert [spec.name for spec in model.inputs] == ["x", "mask", "y"]
    assert "inputs that change no output; they are kept, and may be left out: 'mask', 'y'" in caplog.text


@pytest.mark.parametrize("real", ["mask", "1 - mask"])
def test_a_mask_of_either_meaning_is_seen_to_matter(
    real: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = f"((q @ k.mT).masked_fill(({real})[:, None] == 0, -1e9).softmax(-1) @ k)"
    _loaded(tmp_path, _forward("q, k, mask", result), "q:float32[b,t,3]", "k:float32[b,t,3]", "mask:int64[b,t]")
    assert not caplog.text


def test_a_forward_that_writes_to_its_input_gets_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = _loaded(tmp_path, "def forward(self, x):\n    x += 1\n    return x", "x:float32[b]")
    given = torch.zeros(2)
    assert model.module(given)[0].tolist() == [1.0, 1.0] and given.tolist() == [0.0, 0.0]
    assert not caplog.text
