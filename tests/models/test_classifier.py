"""The classifier, and what it shares with the embedder: sizes, settings, limits."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tx_export.errors import LoadError
from tx_export.models._encoder import EncoderSpec
from tx_export.models.classifier import Classifier
from tx_export.models.embedder import Embedder
from tx_export.models.parts.layers import Norm, Positions
from tx_export.spec import Dim, TensorSpec

_TINY = Classifier(vocab_size=50, max_length=16, d_model=12, num_layers=2, num_heads=3, d_ff=20)
_IDS = torch.tensor([7, 3, 42, 9, 11])
# Float64 on both sides: some hundred roundings of 1.1e-16 of numbers below 100, through four norms.
_BOUND = 1e-10

_OTHER: dict[str, Any] = {
    "vocab_size": 60,
    "max_length": 20,
    "d_model": 24,
    "num_layers": 1,
    "num_heads": 2,
    "head_dim": 5,
    "d_ff": 8,
    "dropout": 0.3,
    "activation": "gelu",
    "norm": "pre",
    "positions": "learned",
    "relative_buckets": 16,
    "relative_distance": 3,
    "epsilon": 1e-5,
    "labels": ("a", "b", "c"),
}


def _built(spec: EncoderSpec = _TINY) -> nn.Module:
    torch.manual_seed(0)
    return spec.build().double().eval()


def _run(module: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = module(ids, mask)
    return out


def _alone(module: nn.Module) -> Tensor:
    return _run(module, _IDS[None], torch.ones(1, 5, dtype=torch.int64))


@pytest.mark.parametrize("family", [Classifier, Embedder])
@pytest.mark.parametrize(
    ("size", "expected", "batch"),
    [
        ("small", (128, 4, 4, 512, 0.1), 32),
        ("medium", (512, 6, 8, 2048, 0.1), 64),
        ("large", (1024, 12, 16, 4096, 0.2), 128),
    ],
)
def test_the_three_sizes(family: type[EncoderSpec], size: str, expected: tuple[float, ...], batch: int) -> None:
    spec = dataclasses.replace(family(), **family.sizes[size])
    assert [spec.d_model, spec.num_layers, spec.num_heads, spec.d_ff, spec.dropout] == list(expected)
    assert family.training_batch[size] == batch
    others = (spec.vocab_size, spec.max_length, spec.epsilon, spec.head_dim, spec.activation, spec.norm, spec.positions)
    assert others == (8000, 512, 1e-6, 0, "relu", "post", "sinusoidal")


def test_there_are_no_other_sizes_and_small_is_the_default() -> None:
    assert list(Classifier.sizes) == list(Classifier.training_batch) == ["small", "medium", "large"]
    assert Classifier() == Classifier(**Classifier.sizes["small"])


@pytest.mark.parametrize("size", ["small", "medium", "large"])
def test_the_number_of_parameters_follows_from_the_size(size: str) -> None:
    spec = Classifier(**Classifier.sizes[size])
    with torch.device("meta"):
        module = spec.build()
    width, inner = spec.d_model, spec.d_ff
    # Four products of attention, two of feed-forward, two norms; then the head over two labels.
    layer = 4 * width * (width + 1) + inner * (width + 1) + width * (inner + 1) + 4 * width
    expected = 8000 * width + spec.num_layers * layer + 2 * (width + 1)
    assert sum(weight.numel() for weight in module.parameters()) == expected
    if size == "small":
        assert expected == 1_817_346


def test_every_field_can_be_set_and_changes_the_model() -> None:
    fields = {field.name for field in dataclasses.fields(Classifier)}
    assert fields == set(_OTHER)
    relative = dataclasses.replace(_TINY, positions="relative", relative_buckets=8)
    for name, value in _OTHER.items():
        spec = relative if name.startswith("relative") else _TINY
        assert _looks(dataclasses.replace(spec, **{name: value})) != _looks(spec), name


def _looks(spec: Classifier) -> tuple[object, ...]:
    module = _built(spec)
    logits = _alone(module)
    assert bool(logits.isfinite().all())
    return repr(module), spec.inputs(), spec.outputs(), logits.tolist()


def test_inputs_and_outputs_are_what_the_module_takes_and_gives() -> None:
    dims = (Dim("batch"), Dim("tokens", 16))
    assert _TINY.inputs() == (
        TensorSpec("input_ids", "int64", dims, 0, 49),
        TensorSpec("attention_mask", "int64", dims, 0, 1),
    )
    assert _TINY.outputs() == (TensorSpec("logits", "float32", (Dim("batch"), 2)),)
    assert _TINY.task == "text-classification"
    module = _TINY.build().eval()
    logits = _run(module, _IDS.expand(3, 5), torch.ones(3, 5, dtype=torch.int64))
    assert (logits.shape, logits.dtype) == ((3, 2), torch.float32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"num_heads": 5},
            r"d_model 12 does not divide by num_heads 5; choose another number of heads, or set head_dim",
        ),
        ({"d_model": 33, "num_heads": 4}, r"d_model 33 does not divide by num_heads 4"),
        ({"head_dim": -1}, r"head_dim is -1; it must be at least 0"),
        ({"vocab_size": 0}, r"vocab_size is 0; it must be at least 1"),
        ({"max_length": 0}, r"max_length is 0; it must be at least 1"),
        ({"d_model": -4}, r"d_model is -4; it must be at least 1"),
        ({"num_layers": 0}, r"num_layers is 0; it must be at least 1"),
        ({"num_heads": 0}, r"num_heads is 0; it must be at least 1"),
        ({"d_ff": 0}, r"d_ff is 0; it must be at least 1"),
        ({"dropout": 1.0}, r"dropout is 1.0; it must be in \[0, 1\)"),
        ({"dropout": float("nan")}, r"dropout is nan"),
        ({"epsilon": 0.0}, r"epsilon is 0.0; it must be above 0"),
        ({"activation": "swish"}, r"activation is 'swish'; known: relu, gelu"),
        ({"norm": "mid"}, r"norm is 'mid'; known: post, pre"),
        ({"positions": "absolute"}, r"positions is 'absolute'; known: sinusoidal, learned, rotary, alibi, relative"),
        ({"positions": "rotary", "head_dim": 5}, r"head_dim is 5; rotary positions turn pairs of channels"),
        ({"relative_buckets": 3}, r"relative_buckets is 3 and relative_distance 128; there must be at least 4 buckets"),
        ({"relative_distance": 8}, r"relative_distance 8; .* the distance be above a quarter of their number"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        dataclasses.replace(_TINY, **changed)


@pytest.mark.parametrize(
    "changed",
    [{"d_model": 33, "num_heads": 3}, {"d_model": 33, "num_heads": 4, "head_dim": 8}, {"d_model": 1, "num_heads": 1}],
)
def test_b040_odd_widths_and_free_head_sizes_work(changed: dict[str, Any]) -> None:
    module = _built(dataclasses.replace(_TINY, **changed))
    assert bool(_alone(module).isfinite().all())


@pytest.mark.parametrize("positions", get_args(Positions))
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("places", [[0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [1, 2, 4, 6, 7]], ids=["right", "left", "holed"])
def test_padding_changes_nothing(places: list[int], norm: Norm, positions: Positions) -> None:
    module = _built(dataclasses.replace(_TINY, norm=norm, positions=positions))
    ids, mask = torch.randint(0, 50, (1, 8)), torch.zeros(1, 8, dtype=torch.int64)
    ids[0, places], mask[0, places] = _IDS, 1
    assert float((_run(module, ids, mask) - _alone(module)).abs().max()) <= _BOUND


def test_batch_mates_change_nothing() -> None:
    module = _built()
    ids, mask = torch.randint(0, 50, (4, 5)), torch.tensor([[1] * 5, [1] * 5, [0, 0, 1, 1, 0], [0] * 5])
    ids[0] = _IDS
    assert float((_run(module, ids, mask)[0] - _alone(module)[0]).abs().max()) <= _BOUND


def test_order_and_every_token_change_the_answer() -> None:
    module = _built()
    others = [_IDS.flip(0), *(_IDS.scatter(0, torch.tensor([place]), 1) for place in range(5))]
    for ids in others:
        found = _run(module, ids[None], torch.ones(1, 5, dtype=torch.int64))
        assert float((found - _alone(module)).abs().max()) > 1e-3


def test_the_label_is_read_from_the_first_real_token() -> None:
    module = _built()
    x = module.encoder(_IDS[None], torch.tensor([[0, 1, 1, 1, 1]]))  # type: ignore[operator]
    expected = module.head(x[:, 1])  # type: ignore[operator]
    found = _run(module, _IDS[None], torch.tensor([[0, 1, 1, 1, 1]]))
    assert float((found - expected).detach().abs().max()) <= _BOUND


@pytest.mark.parametrize("rows", [1, 3])
def test_an_empty_row_gets_the_bias_of_the_head(rows: int) -> None:
    module = _built()
    logits = _run(module, _IDS.expand(rows, 5), torch.zeros(rows, 5, dtype=torch.int64))
    # Zero times finite weights is zero, so the sum is the bias exactly.
    assert torch.equal(logits, module.head.bias.expand(rows, 2))  # type: ignore[union-attr, operator]


def test_dropout_acts_in_training_only() -> None:
    module = _built(dataclasses.replace(_TINY, dropout=0.5))
    assert torch.equal(_alone(module), _alone(module))
    module.train()
    assert not torch.equal(_alone(module), _alone(module))
