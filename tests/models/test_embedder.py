"""The embedder: unit vectors that neither padding nor batch mates change."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from tx_export.models.embedder import Embedder
from tx_export.models.parts.layers import Norm
from tx_export.spec import Dim, TensorSpec

_TINY = Embedder(vocab_size=50, max_length=16, d_model=12, num_layers=2, num_heads=3, d_ff=20)
_IDS = torch.tensor([7, 3, 42, 9, 11])
# Float64 on both sides: some hundred roundings of 1.1e-16 of numbers below 100, through four norms.
_BOUND = 1e-10


def _built(spec: Embedder = _TINY) -> nn.Module:
    torch.manual_seed(0)
    return spec.build().double().eval()


def _run(module: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = module(ids, mask)
    return out


def _alone(module: nn.Module) -> Tensor:
    return _run(module, _IDS[None], torch.ones(1, 5, dtype=torch.int64))


def test_inputs_and_outputs_are_what_the_module_takes_and_gives() -> None:
    assert [spec.name for spec in _TINY.inputs()] == ["input_ids", "attention_mask"]
    assert _TINY.outputs() == (TensorSpec("embedding", "float32", (Dim("batch"), 12)),)
    assert _TINY.task == "sentence-embedding"
    vectors = _run(_TINY.build().eval(), _IDS.expand(3, 5), torch.ones(3, 5, dtype=torch.int64))
    assert (vectors.shape, vectors.dtype) == ((3, 12), torch.float32)


def test_the_embedding_is_the_mean_over_real_tokens_at_unit_length() -> None:
    module = _built()
    ids, mask = _IDS[None], torch.tensor([[0, 1, 1, 0, 1]])
    x = module.encoder(ids, mask).detach()  # type: ignore[operator]
    mean = (x[0, 1] + x[0, 2] + x[0, 4]) / 3
    expected = nn.functional.normalize(mean, dim=0)
    assert float((_run(module, ids, mask)[0] - expected).abs().max()) <= _BOUND


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("places", [[0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [1, 2, 4, 6, 7]], ids=["right", "left", "holed"])
def test_padding_changes_nothing(places: list[int], norm: Norm) -> None:
    module = _built(dataclasses.replace(_TINY, norm=norm))
    ids, mask = torch.randint(0, 50, (1, 8)), torch.zeros(1, 8, dtype=torch.int64)
    ids[0, places], mask[0, places] = _IDS, 1
    assert float((_run(module, ids, mask) - _alone(module)).abs().max()) <= _BOUND


def test_batch_mates_change_nothing() -> None:
    module = _built()
    ids, mask = torch.randint(0, 50, (4, 5)), torch.tensor([[1] * 5, [1] * 5, [0, 0, 1, 1, 0], [0] * 5])
    ids[0] = _IDS
    assert float((_run(module, ids, mask)[0] - _alone(module)[0]).abs().max()) <= _BOUND


def test_an_empty_row_gets_the_zero_vector() -> None:
    vectors = _run(_built(), _IDS.expand(2, 5), torch.tensor([[0] * 5, [1] * 5]))
    assert torch.equal(vectors[0], torch.zeros(12, dtype=torch.float64))
    # The length is the root of 12 squares: 12 roundings of 1.1e-16.
    assert abs(float(vectors[1].norm()) - 1) <= 12 * 1.2e-16


def test_an_embedder_of_odd_width_works() -> None:
    spec = dataclasses.replace(_TINY, d_model=33, num_heads=2, head_dim=5)
    assert _alone(_built(spec)).shape == (1, 33)
