"""The built-in decoder: against torch's own layers, with a cache as without, and its graph beyond the sample's length.

Eager is compared in float64; the bound of 1e-10 is some thousand roundings of 1.1e-16 on values of about one.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from tx_export._cached_form import cached_form
from tx_export.errors import LoadError
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.metrics import fidelity_bound
from tx_export.models.lm import Lm
from tx_export.models.parts.biases import AlibiBias, RelativeBias, causal_buckets
from tx_export.models.parts.decoder import CachedDecoder, Decoder
from tx_export.models.parts.positions import sinusoidal_table
from tx_export.optimize.fold_constants import FoldConstants
from tx_export.runtime_generate import logits_with_cache
from tx_export.testing import eager_model, run_graph

_BOUND = 1e-10  # see above
_VOCABULARY = 50
_SPEC = Lm(
    vocab_size=_VOCABULARY,
    max_length=128,
    d_model=32,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    d_ff=48,
    relative_distance=20,
)
_SPECS: dict[str, Lm] = {
    "alibi of 8 heads": dataclasses.replace(_SPEC, positions="alibi"),
    "alibi of 6 heads": dataclasses.replace(_SPEC, positions="alibi", num_heads=6),
    "relative": dataclasses.replace(_SPEC, positions="relative"),
    "learned, post-norm, a window": dataclasses.replace(_SPEC, positions="learned", norm="post", window=5),
    "rotary": _SPEC,
    "sinusoidal, gelu": dataclasses.replace(_SPEC, positions="sinusoidal", activation="gelu"),
}
_EXPORTED = tuple(_SPECS)[:4]  # the rest differs in what other families are exported with
_CACHE = {"layers": len(_EXPORTED), "heads": 2, "head_dim": 8}  # of these together


def _decoder(spec: Lm, seed: int = 0) -> Decoder:
    """Weights are large, so that attention prefers some tokens and a wrong bias or mask shows."""
    torch.manual_seed(seed)
    module = spec.build().eval()
    assert isinstance(module, Decoder)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "layers" in name and parameter.ndim == 2:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module


def _ids(batch: int, tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(0, _VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def _padded(tokens: int) -> Tensor:
    """A mask of three rows: full, padded on the left, padded on the right."""
    mask = torch.ones(3, tokens, dtype=torch.int64)
    mask[1, : tokens // 3], mask[2, tokens - tokens // 3 :] = 0, 0
    return mask


def _close(found: Tensor, expected: Tensor, bound: float = _BOUND) -> None:
    assert found.shape == expected.shape
    assert bool(found.isfinite().all())
    assert float((found - expected).abs().max()) <= bound


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_logits_are_those_of_torchs_own_layers(
    order: Literal["pre", "post"], activation: Literal["relu", "gelu"]
) -> None:
    spec = dataclasses.replace(
        _SPEC, norm=order, activation=activation, positions="sinusoidal", num_layers=2, num_kv_heads=0, num_heads=4
    )
    ours = _decoder(spec).double()
    table = sinusoidal_table(9, 32).double()
    x = ours.words.weight[_ids(2, 9)] * 32**0.5 + table
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    layer: Any
    for layer in ours.layers:
        theirs = nn.TransformerEncoderLayer(
            32, 4, 48, 0.0, activation, spec.epsilon, batch_first=True, norm_first=order == "pre", dtype=torch.float64
        ).eval()
        attention, copied = layer.attention, theirs.self_attn
        parts = (attention.query, attention.key, attention.value)
        weights = {
            copied.in_proj_weight: torch.cat([part.weight for part in parts]),
            copied.in_proj_bias: torch.cat([part.bias for part in parts]),
        }
        modules = (copied.out_proj, theirs.linear1, theirs.linear2, theirs.norm1, theirs.norm2)
        feed_forward = layer.feed_forward
        own = (attention.output, feed_forward.up, feed_forward.down, layer.attention_norm, layer.feed_forward_norm)
        with torch.no_grad():
            for parameter, value in weights.items():
                parameter.copy_(value)
            for module, source in zip(modules, own, strict=True):
                module.load_state_dict(source.state_dict())
            x = theirs(x, src_mask=hidden)
    with torch.no_grad():
        expected = ours.norm(x) @ ours.words.weight.T
        _close(ours(_ids(2, 9), torch.ones(2, 9, dtype=torch.int64)), expected)


@pytest.mark.parametrize("kind", _SPECS)
def test_b003_rows_padded_on_the_left_are_those_rows_alone(kind: str) -> None:
    ours, ids, lengths = _decoder(_SPECS[kind]).double(), _ids(3, 12), (12, 5, 9)
    mask = torch.stack([(torch.arange(12) >= 12 - length).to(torch.int64) for length in lengths])
    with torch.no_grad():
        together = ours(ids, mask)
        assert bool(together.isfinite().all())
        for row, length in enumerate(lengths):
            alone = ours(ids[row : row + 1, -length:], mask[row : row + 1, -length:])
            _close(together[row : row + 1, -length:], alone, 1e-6)  # the tables of rotations are rounded to float32


@pytest.mark.parametrize("kind", _SPECS)
def test_b009_a_later_token_changes_nothing_before_it(kind: str) -> None:
    ours, ids = _decoder(_SPECS[kind]), _ids(1, 24)
    changed = ids.clone()
    changed[0, 12] += 1
    with torch.no_grad():
        before, after = ours(ids, torch.ones_like(ids)), ours(changed, torch.ones_like(ids))
    assert float((before - after)[:, :12].abs().max()) <= 1e-6  # the bound of the case
    assert float((before - after)[:, 12:].abs().amax(dim=-1).min()) > (-1 if "window" in kind else 1e-6)


@pytest.mark.parametrize("kind", _SPECS)
def test_b161_b162_a_prompt_a_part_and_steps_on_a_cache_are_the_whole_at_once(kind: str) -> None:
    ours, ids, mask = _decoder(_SPECS[kind]).double(), _ids(3, 14), _padded(14)
    cached, found = CachedDecoder(ours), []
    past: Sequence[Tensor] = [torch.zeros(3, 2, 0, 8, dtype=torch.float64)] * 2
    with torch.no_grad():
        for start, end in ((0, 5), (5, 8), *((place, place + 1) for place in range(8, 14))):
            logits, *past = cached(ids[:, start:end], mask[:, :end], torch.arange(end - start), *past)
            found.append(logits)
        _close(torch.cat(found, dim=1), ours(ids, mask))


@pytest.mark.parametrize("heads", [6, 8])
def test_b044_the_alibi_bias_is_slope_times_the_distance_behind(heads: int) -> None:
    slopes = {8: [2.0**-i for i in range(1, 9)], 6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]}[heads]
    bias = AlibiBias(heads)(torch.tensor([[5, 6]]), torch.arange(7)[None])
    behind = torch.tensor([[key - query for key in range(7)] for query in (5, 6)])
    expected = torch.tensor(slopes)[:, None, None] * behind
    assert torch.equal(bias[0][:, behind <= 0], expected[:, behind <= 0])


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 20), (8, 9)])
@pytest.mark.parametrize(("past", "new"), [(0, 8), (0, 21), (0, 40), (40, 1), (150, 3)])
def test_b046_the_relative_bias_on_a_cache_is_that_of_t5s_decoder(
    past: int, new: int, buckets: int, max_distance: int
) -> None:
    config = T5Config(
        num_heads=3,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance,
        is_decoder=True,
    )
    theirs: Any = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = RelativeBias(3, buckets, max_distance, causal_buckets)
    ours.table.load_state_dict(theirs.relative_attention_bias.state_dict())
    found = ours(torch.arange(past, past + new)[None], torch.arange(past + new)[None])
    assert torch.equal(found, theirs.compute_bias(new, past + new, past_seen_tokens=past))


class _Together(nn.Module):
    """One decoder of each kind, so that one export does for all: the logits of one behind those of another."""

    def __init__(self, decoders: Sequence[Decoder]) -> None:
        super().__init__()
        self.each = nn.ModuleList(CachedDecoder(decoder) for decoder in decoders)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        shared, past = tensors[:3], tensors[3:]
        parts = [part(*shared, *past[2 * index : 2 * index + 2]) for index, part in enumerate(self.each)]
        return torch.cat([part[0] for part in parts], dim=-1), *(cache for part in parts for cache in part[1:])


@pytest.fixture(scope="module", params=["fused", "standard"])
def every(request: pytest.FixtureRequest) -> tuple[list[Decoder], ir.Model]:
    """Decoders and their graph; its sample has 7 tokens, and a cache of another length."""
    decoders = [_decoder(_SPECS[kind], seed) for seed, kind in enumerate(_EXPORTED)]
    whole = dataclasses.replace(_SPEC, num_layers=len(decoders), vocab_size=_VOCABULARY * len(decoders))
    plain = eager_model(whole.build(), whole.inputs(), whole.outputs(), task=whole.task)
    form = cached_form(dataclasses.replace(plain, cache=whole.cache()))
    graph = export(dataclasses.replace(form, module=_Together(decoders)), Target.parse(None, request.param))
    FoldConstants()(graph)
    kinds = [node.op_type for node in graph.graph]
    assert kinds.count("GroupQueryAttention") == (len(decoders) if request.param == "fused" else 0)
    assert request.param != "fused" or not {"Shape", "Expand", "Softmax"} & set(kinds)
    return decoders, graph


def _eager(decoders: Sequence[Decoder], ids: Tensor, mask: Tensor) -> np.ndarray:
    with torch.no_grad():
        return torch.cat([decoder(ids, mask) for decoder in decoders], dim=-1).numpy()


def _assert_within_fidelity(found: np.ndarray, expected: np.ndarray, mask: Tensor) -> None:
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    real = mask.numpy() == 1
    difference = np.abs(found - expected)[real].max()
    assert difference <= fidelity_bound(float(np.abs(expected).max()))


@pytest.mark.parametrize("tokens", [1, 2, 5, 12, 21, 41, 64, 128])
def test_b009_b022_b044_b046_the_graph_is_eager_at_every_length(
    tokens: int, every: tuple[list[Decoder], ir.Model]
) -> None:
    """Read as a prompt, two tokens at once and single steps, which are at position 40 for 41 tokens."""
    decoders, graph = every
    ids, mask = _ids(3, tokens), _padded(tokens)
    arrays = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    found = logits_with_cache(lambda feeds: run_graph(graph, dict(feeds)), _CACHE, arrays)["logits"]
    _assert_within_fidelity(found, _eager(decoders, ids, mask), mask)


def _feeds(ids: Tensor, past: int, room: int, at: Sequence[int]) -> dict[str, np.ndarray]:
    """Ids behind a random cache of `past` positions, with room for more behind them."""
    random = np.random.default_rng(0)
    feeds = {
        "input_ids": ids.numpy(),
        "attention_mask": np.ones((1, past + ids.shape[1]), np.int64),
        "logits_at": np.array(at),
    }
    for layer in range(len(_EXPORTED)):
        for kind in ("key", "value"):
            held = random.standard_normal((1, 2, past, 8)).astype(np.float32)
            space = np.full((1, 2, room, 8), 1e3, np.float32)
            feeds[f"past.{layer}.{kind}"] = np.concatenate([held, space], axis=2)
    return feeds


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_cache_with_room_gives_the_same_and_keeps_its_size(
    tokens: int, every: tuple[list[Decoder], ir.Model]
) -> None:
    """As the runtime binds it: one buffer for what was and what is then."""
    _, graph = every
    ids = _ids(1, tokens)
    exact = run_graph(graph, _feeds(ids, 9, 0, range(tokens)))
    roomy = run_graph(graph, _feeds(ids, 9, 6, range(tokens)))
    for name, value in exact.items():
        kept = roomy[name] if name == "logits" else roomy[name][:, :, : 9 + tokens]
        assert np.abs(value - kept).max() <= fidelity_bound(float(np.abs(value).max()))
        assert name == "logits" or roomy[name].shape[2] == 15


def test_only_the_positions_that_are_asked_for_get_logits(every: tuple[list[Decoder], ir.Model]) -> None:
    _, graph = every
    ids = _ids(1, 6)
    whole, last = (run_graph(graph, _feeds(ids, 0, 0, at))["logits"] for at in (range(6), [5]))
    assert last.shape == (1, 1, _VOCABULARY * len(_EXPORTED))
    assert np.abs(last - whole[:, 5:]).max() <= fidelity_bound(float(np.abs(whole).max()))


@pytest.mark.parametrize("kind", _SPECS)
def test_training_reaches_every_parameter_from_logits_of_unit_variance(kind: str) -> None:
    torch.manual_seed(0)
    module, ids = _SPECS[kind].build().train(), _ids(4, 16)
    logits = module(ids, torch.ones_like(ids))
    assert 0.5 < float(logits.detach().std()) < 2
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, name


def test_the_small_model_has_the_classifiers_sizes_and_one_table_for_words_and_head() -> None:
    model = load("lm", weights="random:0")
    count = sum(parameter.numel() for parameter in model.module.parameters())
    layer = 4 * (128 * 128 + 128) + 2 * 128 * 512 + 512 + 128 + 2 * 2 * 128
    assert count == 8000 * 128 + 4 * layer + 2 * 128
    assert model.task == "text-generation" and model.cache is not None and model.padding == "any"


def test_a_continuation_begins_and_ends_with_the_shipped_tokenizers_tokens() -> None:
    file = importlib.resources.files("tx_export.models.weights") / "classifier-small.tokenizer.json"
    ids = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    spec = Lm().generation()
    assert spec is not None
    assert (spec.pad, spec.bos, spec.eos) == (ids["[PAD]"], ids["[CLS]"], (ids["[SEP]"],))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads is 3; it must divide num_heads, which is 8, or be 0"),
        ({"num_kv_heads": -1}, "num_kv_heads is -1; it must divide num_heads"),
        ({"window": -1}, "window is -1; it must be a number of tokens, or 0 for all"),
        ({"relative_distance": 16}, "relative_distance is 16; it must be above half of the 32 relative_buckets"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        dataclasses.replace(_SPEC, **fields)  # type: ignore[arg-type]
