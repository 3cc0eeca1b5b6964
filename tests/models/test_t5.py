"""T5 against transformers' own, on tiny random checkpoints of its forms: plain, and built with a cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import transformers
from torch import Tensor

from tx_export import runtime
from tx_export.compiler import BuildOptions, build
from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.models.parts.causal import Cache
from tx_export.models.parts.encoder_decoder import EncoderDecoder
from tx_export.models.t5 import T5

from .checkpoints import assert_equal, feeds, ours

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_max_distance": 20,
    "n_positions": 48,
    "decoder_start_token_id": 0,
}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_FORMS: dict[str, dict[str, Any]] = {
    "t5": _SIZES,
    # Heads of 6 channels are more than the fused operator takes.
    "t5 1.1": {**_SIZES, **_GATED, "d_kv": 6, "num_decoder_layers": None},
    # So does transformers 5 save a model of such a configuration: tied, without the scale.
    "gated and tied": {**_SIZES, **_GATED},
}


def _saved(folder: Path, form: str) -> Any:
    """A random model of transformers, saved; large weights, but for a query's, which holds the scale of the scores."""
    torch.manual_seed(0)
    config: Any = transformers.T5Config(**_FORMS[form])
    model: Any = transformers.T5ForConditionalGeneration(config)
    model.eval()
    if form == "t5 1.1":
        model.lm_head.weight = torch.nn.Parameter(torch.empty(300, 48))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            large = 0.2 * config.d_kv**-0.5 if "Attention.q." in name else 0.2
            parameter.copy_(torch.randn_like(parameter) * large + ("norm" in name))
    model.save_pretrained(folder)
    if form == "t5 1.1":  # as its checkpoints say it
        file = folder / "config.json"
        saved = {key: value for key, value in json.loads(file.read_text()).items() if key != "scale_decoder_outputs"}
        file.write_text(json.dumps({**saved, "tie_word_embeddings": False}))
    return model


def _theirs(model: Any, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**given).logits
    return out


@pytest.mark.parametrize("form", _FORMS)
def test_logits_equal_transformers_with_padding_on_either_side(form: str, tmp_path: Path) -> None:
    reference = _saved(tmp_path, form)
    model = load(str(tmp_path))
    assert model.task == "text2text-generation"
    for batch, tokens in ((1, 1), (2, 2), (4, 17), (1, 48)):
        for kind in ("full", "right", "left"):
            given = feeds(model, batch, tokens, kind)
            assert_equal(ours(model, given), _theirs(reference, given))


def test_b046_steps_on_a_cache_are_the_whole_at_once_as_far_as_position_40(tmp_path: Path) -> None:
    _saved(tmp_path, "t5")
    model = load(str(tmp_path))
    module, given = model.module.double(), feeds(model, 3, 44, "left")
    assert isinstance(module, EncoderDecoder)
    ids, source = given["decoder_input_ids"], given["attention_mask"]
    with torch.no_grad():
        cross, found = module.encode(given["input_ids"], source), []
        past: Sequence[Cache | None] = [None] * 3
        for start, end in ((0, 30), (30, 38), *((place, place + 1) for place in range(38, 44))):
            hidden, past = module.decode(ids[:, start:end], torch.ones_like(ids)[:, :end], source, cross, past)
            found.append(module.logits(hidden))
        # Another order of sums in float64, of some hundred terms of about one.
        assert float((torch.cat(found, dim=1) - ours(model, given)).abs().max()) <= 1e-10


@pytest.mark.parametrize("form", ["t5", "t5 1.1"])
def test_b161_b162_the_artifact_reads_with_a_cache_what_transformers_reads_without(form: str, tmp_path: Path) -> None:
    reference = _saved(tmp_path / "checkpoint", form)
    folder = build(BuildOptions(source=str(tmp_path / "checkpoint"), output=tmp_path / "built", quantize="none"))
    artifact, model = runtime.Model(folder), load(str(tmp_path / "checkpoint"))
    assert runtime.self_test(artifact)["agrees"]
    for batch, tokens in ((1, 1), (3, 2), (3, 17), (1, 48)):
        for kind in ("full", "right", "left"):
            given = feeds(model, batch, tokens, kind)
            found = artifact.run_arrays({name: tensor.numpy() for name, tensor in given.items()})["logits"]
            assert_equal(torch.from_numpy(found), _theirs(reference, given))
    kinds = [node.op_type for node in ir.load(folder / "decoder.onnx").graph]
    assert kinds.count("MultiHeadAttention") == len(model.module.layers)  # type: ignore[arg-type]
    assert kinds.count("GroupQueryAttention") == (3 if form == "t5" else 0)


def test_a_decoded_token_changes_nothing_before_it(tmp_path: Path) -> None:
    _saved(tmp_path, "t5")
    model = load(str(tmp_path))
    given = feeds(model, 1, 24, "full")
    changed = {name: tensor.clone() for name, tensor in given.items()}
    changed["decoder_input_ids"][0, 12] = (changed["decoder_input_ids"][0, 12] + 1) % 300
    difference = (ours(model, given) - ours(model, changed)).abs()
    assert float(difference[:, :12].max()) <= 1e-6  # nothing but another order of sums
    assert float(difference[:, 12:].amax(dim=-1).min()) > 1e-6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj is 'gated-silu'; supported: relu, gated-gelu"),
        ({"d_kv": 0}, "d_kv is 0; it must be at least 1"),
        ({"num_decoder_layers": 0}, "num_decoder_layers is 0; it must be in 1 to 1000"),
        ({"relative_attention_max_distance": 16}, "relative_attention_max_distance 16; there must be at least 4 buck"),
        ({"is_decoder": True}, "is_decoder is True; t5 supports False only"),
        ({"rotary": 1}, "rotary is 1, which t5 does not support"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        T5.from_config({"architectures": ["T5ForConditionalGeneration"], **config}, None, ())


def test_a_checkpoint_without_a_start_begins_with_padding(tmp_path: Path) -> None:
    _saved(tmp_path, "t5")
    for name in ("config.json", "generation_config.json"):
        file = tmp_path / name
        if file.is_file():
            said = json.loads(file.read_text())
            file.write_text(json.dumps({key: value for key, value in said.items() if key != "decoder_start_token_id"}))
    generation = load(str(tmp_path)).generation
    assert generation is not None and generation.start == 0
