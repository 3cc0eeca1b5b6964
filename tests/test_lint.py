"""The linter: every fault of a user's module with its file and line, and nothing about modules that export well."""

from __future__ import annotations

import importlib.util
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import einops
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tx_export.errors import LoadError
from tx_export.lint import Finding, lint
from tx_export.load import load
from tx_export.testing import eager_model

_INPUTS = ["x:float32[batch,tokens<=64,8]", "mask:int64[batch,tokens<=64]"]
_OUTPUTS = ["y:float32[batch,tokens,8]"]
_HEADER = """\
import math
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(64, 8))
    def forward(self, x, mask):
"""
_FORWARD_LINE = len(_HEADER.splitlines())

Write = Callable[[str], nn.Module]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A module of a user's file `users.py` whose forward is the text."""

    def make(forward: str) -> nn.Module:
        path = tmp_path / "users.py"
        path.write_text(_HEADER + textwrap.indent(textwrap.dedent(forward).strip("\n"), " " * 8), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("users", path)
        assert spec is not None and spec.loader is not None
        source = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(source)
        module = source.Model()
        assert isinstance(module, nn.Module)
        return module

    return make


def _lint(module: nn.Module, inputs: Sequence[str] = _INPUTS) -> tuple[Finding, ...]:
    return lint(eager_model(module, inputs, _OUTPUTS))


# The forward; the kind, severity, line of forward (from 1) and expression of what must be found, and nothing else.
_FAULTS = {
    "a branch on a size": (
        "if x.shape[1] > 4:\n    x = x * 2\nreturn x", "shape-branch", "warning", 1, "x.shape[1] > 4",
    ),
    "B022: a branch on a size of 1": (
        "y = x\nif x.size(1) == 1:\n    y = x * 2\nreturn y", "shape-branch", "warning", 2, "x.size(1) == 1",
    ),
    "B030: a division by int of a size": (
        "return x / int(x.shape[1])", "frozen-dimension", "error", 1, "int(x.shape[1])",
    ),
    "a root of a size": ("return x / math.sqrt(x.shape[-2])", "frozen-dimension", "error", 1, "math.sqrt(x.shape[-2])"),
    "a loop over the tokens": (
        "rows = []\nfor i in range(x.shape[1]):\n    rows.append(x[:, i])\nreturn torch.stack(rows, 1)",
        "frozen-dimension", "error", 2, "range(x.shape[1])",
    ),
    "B021: the length of a tensor": ("return x / len(x)", "frozen-dimension", "error", 1, "len(x)"),
    "B008: a branch on the mask": (
        "if mask.all():\n    return x\nreturn x * mask[..., None]", "data-branch", "error", 1, "if mask.all()",
    ),
    "a branch on a sum": ("y = x * 2\nreturn y if mask.sum() > 3 else x", "data-branch", "error", 2, "mask.sum() > 3"),
    "a number of a size where tracing takes its other way": (
        "n = int(x.shape[1])\nreturn x * float(mask.sum()) / n", "data-value", "warning", 2, "float(mask.sum())",
    ),
    "a size that is the example's by chance": (
        "return x * 2 if x.shape[1] == 5 else x", "frozen-dimension", "error", 1, "x.shape[1] == 5",
    ),
    "a number read from a tensor": ("return x * mask.sum().item()", "data-value", "warning", 1, "mask.sum().item()"),
    "indexing with a mask": ("return self.linear(x[mask.bool()])", "data-shape", "warning", 1, "x[mask.bool()]"),
    "the places that are not 0": ("return mask.nonzero() * 1.0", "data-shape", "warning", 1, "mask.nonzero()"),
    "B042: a table stored in forward": (
        "n = x.shape[1]\nself.grown = torch.arange(n)\nreturn x + self.grown[:, None]", "state", "warning", 2, "grown",
    ),
    "a buffer written in place": (
        "self.table.add_(1)\nreturn x + self.table[: x.shape[1]]", "state", "warning", 1, "table",
    ),
    "B047: complex rotation": (
        "z = torch.view_as_complex(x.view(*x.shape[:2], 4, 2))\nreturn torch.view_as_real(z).flatten(2)",
        "complex", "warning", 1, "view_as_complex",
    ),
    "a fill with -1e9": (
        "s = (x @ x.mT).masked_fill(mask[:, None] == 0, -1e9)\nreturn s.softmax(-1) @ x",
        "large-fill", "warning", 1, "-1e9",
    ),
    "a mask multiplied by -1e9": (
        "s = x @ x.mT + (1.0 - mask[:, None]) * -1e9\nreturn s.softmax(-1) @ x", "large-fill", "warning", 1, "* -1e9",
    ),
    "a fill with -inf": (
        's = (x @ x.mT).masked_fill(mask[:, None] == 0, float("-inf"))\nreturn s.softmax(-1) @ x',
        "nan", "error", 1, 'float("-inf")',
    ),
    "B080: dropout that eval mode does not stop": (
        "return nn.functional.dropout(x, 0.5, training=True)", "random", "error", 1, "nn.functional.dropout",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _FAULTS)
def test_a_fault_is_found_with_its_file_line_expression_and_remedy(name: str, write: Write, tmp_path: Path) -> None:
    forward, kind, severity, line, code = _FAULTS[name]
    (found,) = _lint(write(forward))
    assert (found.kind, found.severity) == (kind, severity)
    assert (found.file, found.line) == (str(tmp_path / "users.py"), _FORWARD_LINE + line)
    assert code in found.message and found.remedy
    assert str(found).startswith(f"{tmp_path / 'users.py'}:{_FORWARD_LINE + line}: in Model: ")


def test_a_fault_in_a_module_inside_carries_its_dotted_path(write: Write) -> None:
    (found,) = _lint(_Calls(write("return x / int(x.shape[1])")))
    assert found.line == _FORWARD_LINE + 1 and found.message.startswith("in inner: ")


class _Calls(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found = self.inner(x, mask)
        assert isinstance(found, Tensor)
        return found


def test_a_bound_that_is_declared_is_no_branch(write: Write) -> None:
    module = write("assert x.shape[1] <= 64\nreturn x + self.table[: x.shape[1]]")
    assert not _lint(module)
    wider = [text.replace("<=64", "<=65") for text in _INPUTS]
    assert [found.kind for found in _lint(module, wider)] == ["shape-branch"]


def test_a_dimension_declared_as_a_number_may_be_used_as_one(write: Write) -> None:
    module = write("if x.shape[1] > 4:\n    x = x * 2\nreturn x / int(x.shape[1]) / math.sqrt(x.shape[2])")
    assert not _lint(module, ["x:float32[batch,16,8]", "mask:int64[batch,16]"])


def test_an_assertion_on_values_is_no_fault(write: Write) -> None:
    assert not _lint(write("assert (mask >= 0).all()\nreturn x"))


def test_a_causal_mask_of_infinities_leaves_no_row_empty_and_is_no_fault(write: Write) -> None:
    assert not _lint(
        write("""
            n = x.shape[1]
            future = torch.triu(torch.full((n, n), float("-inf")), 1)
            return (x @ x.mT + future).softmax(-1) @ x
        """)
    )


def test_linting_leaves_the_module_as_it_was(write: Write) -> None:
    module = write("self.calls = x.shape[0]\nself.table.add_(1)\nreturn x + self.table[: x.shape[1]]")
    (attribute, buffer) = _lint(module)
    assert {attribute.line, buffer.line} == {_FORWARD_LINE + 1, _FORWARD_LINE + 2}
    assert not hasattr(module, "calls")
    assert bool((dict(module.named_buffers())["table"] == 1).all())


def test_a_loaded_module_is_linted_like_any_other(write: Write, tmp_path: Path) -> None:
    write("self.grown = torch.arange(x.shape[1])\nreturn (x + self.grown[:, None]) / int(x.shape[0])")
    model = load(f"{tmp_path / 'users.py'}:Model", inputs=_INPUTS)
    frozen, state = lint(model)
    assert (frozen.kind, frozen.line) == ("frozen-dimension", _FORWARD_LINE + 2)
    assert (state.kind, state.line) == ("state", _FORWARD_LINE + 1)
    assert frozen.message.startswith("in Model: ") and "forward changes grown" in state.message


def test_a_module_that_raises_on_an_empty_row_is_an_error_with_its_line(write: Write, tmp_path: Path) -> None:
    module = write("if (mask.sum(1) == 0).any():\n    raise ValueError('nothing to attend to')\nreturn x")
    with pytest.raises(
        LoadError, match=rf"users\.py:{_FORWARD_LINE + 2}: forward raised ValueError: nothing to attend"
    ):
        _lint(module)


def test_a_part_that_stays_in_train_mode_is_named(write: Write, tmp_path: Path) -> None:
    module = write("return x")
    model = eager_model(_Calls(module), _INPUTS, _OUTPUTS)
    module.train()
    (found,) = lint(model)
    assert (found.kind, found.severity) == ("train-mode", "warning")
    assert str(found).startswith(f"{tmp_path / 'users.py'}:4: inner stays in train mode")


class _Stock(nn.Module):
    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found = self.encoder(x, src_key_padding_mask=mask == 0)
        assert isinstance(found, Tensor)
        return found


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        found = self.decoder(x, x, tgt_mask=causal, memory_key_padding_mask=mask == 0)
        assert isinstance(found, Tensor)
        return found


class _Einops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = einops.rearrange(self.qkv(x), "b t (n h d) -> n b h t d", n=3, h=2).unbind(0)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(mask[:, None, None] == 0, torch.finfo(scores.dtype).min)
        found = self.out(einops.rearrange(scores.softmax(-1) @ v, "b h t d -> b t (h d)"))
        assert isinstance(found, Tensor)
        return found


class _Sdpa(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.position, self.dropout = nn.Linear(8, 24), nn.Embedding(64, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        x = x + self.position(torch.arange(tokens, device=x.device))
        q, k, v = self.qkv(x).view(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, mask[:, None, None].bool(), 0.5 if self.training else 0.0)
        dropped = self.dropout(attended.transpose(1, 2).reshape(batch, tokens, width))
        assert isinstance(dropped, Tensor)
        return dropped


class _HuggingFace(nn.Module):
    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(
            vocab_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
        )
        self.bert = BertModel(config)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found = self.bert(inputs_embeds=x, attention_mask=mask)[0]
        assert isinstance(found, Tensor)
        return found


@pytest.mark.parametrize(
    "make",
    [lambda: _Stock(False), lambda: _Stock(True), _Decoder, _Einops, _Sdpa, _HuggingFace],
    ids=["torch", "torch, norm first", "torch decoder", "einops", "SDPA", "Hugging Face"],
)
def test_a_module_that_exports_well_has_no_findings(make: Callable[[], nn.Module]) -> None:
    assert not _lint(make())
