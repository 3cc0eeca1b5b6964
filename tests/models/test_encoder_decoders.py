"""Encoder-decoders against PyTorch's own layers and transformers' models, whole, in steps with a cache, and as graphs.

Bounds are those of fp32 fidelity: 1e-4, or 3e-6 of the largest value (`assert_equal`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import transformers
from torch import Tensor, nn

from tx_export import runtime_generate
from tx_export._cached_form import cached_form
from tx_export._halves import halves
from tx_export.errors import LoadError
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.models.bart import Bart
from tx_export.models.marian import Marian
from tx_export.models.parts.encoder_decoder import CrossLayer, EncoderDecoder
from tx_export.models.parts.layers import Norm
from tx_export.models.seq2seq import Seq2seq
from tx_export.optimize.fold_constants import FoldConstants
from tx_export.spec import EagerModel
from tx_export.testing import eager_model

from .checkpoints import assert_equal

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "max_position_embeddings": 40,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 64,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
_MARIAN = {**_SIZES, "activation_function": "swish"}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", {**_SIZES, "scale_embedding": True}),
    "bart with a relu": ("BartForConditionalGeneration", {**_SIZES, "activation_function": "relu"}),
    # Heads of 12 channels are more than the fused operator takes.
    "marian": ("MarianMTModel", {**_MARIAN, "scale_embedding": True, "decoder_attention_heads": 4}),
    "marian of two vocabularies": (
        "MarianMTModel",
        {**_MARIAN, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 250},
    ),
    "marian with a head of its own": (
        "MarianMTModel",
        {**_MARIAN, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    ),
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _saved(folder: Path, family: str, **changes: Any) -> Any:
    """A random model of transformers, saved; its weights are large, so that softmax and activations are not linear."""
    torch.manual_seed(0)
    name, config = _FAMILIES[family]
    start = "Bart" if family.startswith("bart") else "Marian"
    made = getattr(transformers, f"{start}Config")(**config | changes, attn_implementation="eager")
    model = getattr(transformers, name)(made).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_gain = "norm" in parameter_name and parameter_name.endswith("weight")
            if parameter.requires_grad:  # all but the table of sines and cosines
                parameter.copy_(torch.randn_like(parameter) * 0.2 + is_gain)
        model.final_logits_bias.normal_()
    model.save_pretrained(folder)
    return model


def _seq2seq(norm: Norm, num_layers: int = 2) -> EagerModel:
    """Ours, with weights so large that softmax and activations are not linear."""
    spec = Seq2seq(vocab_size=300, max_length=40, d_model=64, num_layers=num_layers, num_heads=4, d_ff=96, norm=norm)
    torch.manual_seed(0)
    module = spec.build().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" not in name and "embedding" not in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model = eager_model(module, spec.inputs(), spec.outputs(), family="seq2seq", task=spec.task)
    return dataclasses.replace(model, cache=spec.cache(), generation=spec.generation())


def _drawn(batch: int, tokens: int, decoded: int, side: Literal["left", "right"] = "right") -> dict[str, Tensor]:
    """A full source, and shorter and shorter ones."""
    random = torch.Generator().manual_seed(1)
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    for row in range(1, batch):
        padding = slice(tokens - min(tokens - 1, 3 * row), None) if side == "right" else slice(min(tokens - 1, 3 * row))
        mask[row, padding] = 0
    return {
        "input_ids": torch.randint(3, 250, (batch, tokens), generator=random),
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(3, 250, (batch, decoded), generator=random),
    }


def _logits(module: nn.Module, given: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = module(given["input_ids"], given["attention_mask"], given["decoder_input_ids"])
    return out


def _whole(module: nn.Module) -> EncoderDecoder:
    assert isinstance(module, EncoderDecoder)
    return module


def _layers(module: EncoderDecoder) -> list[CrossLayer]:
    return [layer for layer in module.layers if isinstance(layer, CrossLayer)]


def _torch_decoder(module: EncoderDecoder, norm: Norm) -> nn.TransformerDecoder:
    """PyTorch's own decoder with the same weights."""
    layer = nn.TransformerDecoderLayer(64, 4, 96, 0.0, layer_norm_eps=1e-6, batch_first=True, norm_first=norm == "pre")
    decoder = nn.TransformerDecoder(layer, len(module.layers)).eval()
    layers: Any = decoder.layers
    for theirs, ours in zip(layers, _layers(module), strict=True):
        for attention, own in ((theirs.self_attn, ours.attention), (theirs.multihead_attn, ours.cross_attention)):
            parts = (own.query, own.key, own.value)
            attention.in_proj_weight.data = torch.cat([part.weight for part in parts]).detach()
            attention.in_proj_bias.data = torch.cat([part.bias for part in parts]).detach()
            attention.out_proj.load_state_dict(own.output.state_dict())
        pairs: tuple[tuple[nn.Module, Any], ...] = (
            (theirs.norm1, ours.attention_norm),
            (theirs.norm2, ours.cross_attention_norm),
            (theirs.norm3, ours.feed_forward_norm),
            (theirs.linear1, ours.feed_forward.up),
            (theirs.linear2, ours.feed_forward.down),
        )
        for part, same in pairs:
            part.load_state_dict(same.state_dict())
    return decoder


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_decoder_layers_are_those_of_the_article_as_pytorch_has_them(norm: Norm) -> None:
    module = _whole(_seq2seq(norm).module)
    given = _drawn(3, 9, 7)
    with torch.no_grad():
        encoded = module.encoder(given["input_ids"], given["attention_mask"])
        x = module.embedding(given["decoder_input_ids"], torch.arange(7).expand(3, 7))
        unseen = torch.ones(7, 7, dtype=torch.bool).triu(1)
        padding = given["attention_mask"] == 0
        x = _torch_decoder(module, norm)(x, encoded, tgt_mask=unseen, memory_key_padding_mask=padding)
        expected = module.norm(x) @ module.get_parameter("encoder.embedding.weight").T
    assert_equal(_logits(module, given), expected)


def test_embeddings_are_scaled_and_positions_are_sines_and_cosines() -> None:
    module = _whole(_seq2seq("post").module)
    ids, places = torch.tensor([[7, 8]]), torch.tensor([[0, 3]])
    found = module.embedding(ids, places).detach()
    for index, place in enumerate((0, 3)):
        channel = torch.arange(64)
        angle = place / 10000 ** (2 * (channel // 2) / 64)
        waves = torch.where(channel % 2 == 0, angle.sin(), angle.cos())
        assert_equal(found[0, index], module.get_parameter("encoder.embedding.weight")[ids[0, index]] * 8 + waves)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_padding_of_the_source_on_either_side_changes_nothing(norm: Norm) -> None:
    module = _seq2seq(norm).module
    for side in ("left", "right"):
        given = _drawn(3, 9, 7, side)
        together = _logits(module, given)
        for row in range(3):
            real = given["attention_mask"][row] != 0
            alone = {"input_ids": given["input_ids"][row : row + 1, real], "attention_mask": real[real][None]}
            alone["decoder_input_ids"] = given["decoder_input_ids"][row : row + 1]
            assert_equal(together[row : row + 1], _logits(module, alone))


def test_a_source_without_a_real_position_is_attended_to_as_nothing() -> None:
    module = _seq2seq("post").module
    given = _drawn(2, 9, 7)
    given["attention_mask"][1] = 0
    found = _logits(module, given)
    for layer in _layers(_whole(module)):  # so that nothing comes from the source, whatever is in it
        layer.cross_attention.value.weight.data.zero_()
        layer.cross_attention.value.bias.data.zero_()
    assert torch.equal(found[1], _logits(module, given)[1])
    assert not torch.allclose(found[0], _logits(module, given)[0])


def test_steps_with_a_cache_are_one_pass_and_what_comes_later_changes_nothing() -> None:
    module = _whole(_seq2seq("post").module)
    given = _drawn(3, 9, 7)
    expected, mask = _logits(module, given), given["attention_mask"]
    with torch.no_grad():
        cross = module.encode(given["input_ids"], mask)
        x, past = module.decode(given["decoder_input_ids"][:, :4], None, mask, cross, [None, None])
        assert_equal(module.logits(x), expected[:, :4])
        for end in range(5, 8):
            new, real = given["decoder_input_ids"][:, end - 1 : end], torch.ones(3, end, dtype=torch.int64)
            x, past = module.decode(new, real, mask, cross, past)
            assert_equal(module.logits(x), expected[:, end - 1 : end])


def test_a_new_model_is_trained_by_teacher_forcing() -> None:
    """From logits of unit variance, with a gradient for every weight, to the targets of four rows by heart."""
    spec = Seq2seq(vocab_size=300, d_model=64, num_layers=2, num_heads=4, d_ff=96, dropout=0.1)
    module, given = spec.build().train(), _drawn(4, 9, 8)
    targets = given["decoder_input_ids"]
    assert 0.8 < float(_logits(module, given).std()) < 1.25
    optimizer = torch.optim.Adam(module.parameters(), 3e-3)
    for _ in range(60):
        logits = module(given["input_ids"], given["attention_mask"], targets[:, :-1])
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), targets[:, 1:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in module.parameters())
        optimizer.step()
    assert torch.equal(_logits(module.eval(), given)[:, :-1].argmax(dim=-1), targets[:, 1:])


def test_positions_of_a_decoder_behind_an_encoder_are_added() -> None:
    with pytest.raises(LoadError, match="positions is 'rotary'; a decoder behind an encoder has sinusoidal or learned"):
        Seq2seq(positions="rotary")


@pytest.mark.parametrize("family", _FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    reference, model = _saved(tmp_path, family), load(str(tmp_path))
    assert (model.task, model.padding) == ("text2text-generation", "right")
    for batch, tokens, decoded in ((1, 1, 1), (2, 2, 5), (4, 17, 11), (1, 40, 40)):
        given = _drawn(batch, tokens, decoded)
        with torch.no_grad():
            expected = reference(**given).logits
        assert_equal(_logits(model.module, given), expected)


def test_attention_weights_equal_transformers_with_a_cache_too(tmp_path: Path) -> None:
    reference, module = _saved(tmp_path, "bart"), _whole(load(str(tmp_path)).module)
    given = _drawn(3, 9, 7)
    mask, ids = given["attention_mask"], given["decoder_input_ids"]
    with torch.no_grad():
        theirs = reference(**given, output_attentions=True)
        cross = module.encode(given["input_ids"], mask)
        whole = module.attention_weights(ids, None, mask, cross, [None] * 3)
        _, past = module.decode(ids[:, :4], None, mask, cross, [None] * 3)
        rest = module.attention_weights(ids[:, 4:], torch.ones_like(ids), mask, cross, past)
    for layer in range(3):
        expected = theirs.decoder_attentions[layer], theirs.cross_attentions[layer]
        for found, later, weights in zip(whole[layer], rest[layer], expected, strict=True):
            assert_equal(found, weights)
            assert_equal(later, weights[:, :, 4:])


def test_attention_weights_of_a_source_without_a_real_position_are_zero() -> None:
    module, given = _whole(_seq2seq("pre").module), _drawn(2, 9, 7)
    given["attention_mask"][1] = 0
    with torch.no_grad():
        cross = module.encode(given["input_ids"], given["attention_mask"])
        found = module.attention_weights(given["decoder_input_ids"], None, given["attention_mask"], cross, [None] * 2)
    for own, over_source in found:
        assert (own.shape, over_source.shape) == ((2, 4, 7, 7), (2, 4, 7, 9))
        assert_equal(over_source.sum(dim=-1), torch.tensor([1.0, 0.0])[:, None, None].expand(2, 4, 7))


# Of each graph: the source, its layers, how it is spelt, and how many of which attention the halves hold.
_Spelt = tuple[str, int, Literal["fused", "standard"], str | None, dict[str, int], dict[str, int]]
_GRAPHS: dict[str, _Spelt] = {
    "seq2seq, fused": (
        "post", 2, "fused", None, {"MultiHeadAttention": 2}, {"MultiHeadAttention": 2, "GroupQueryAttention": 2}
    ),
    "seq2seq, with the standard Attention": ("pre", 1, "standard", "1.23", {"Attention": 1}, {"Attention": 1}),
    "bart, in plain products": ("bart", 2, "standard", None, {}, {}),
    "marian, fused, of heads that GroupQueryAttention refuses": (
        "marian", 1, "fused", None, {"MultiHeadAttention": 1}, {"MultiHeadAttention": 1}
    ),
}  # fmt: skip


@dataclasses.dataclass
class _Graphs:
    model: EagerModel
    reference: Any  # of transformers, for a checkpoint
    sessions: Mapping[str, onnxruntime.InferenceSession]
    held: Mapping[str, Counter[str]]  # operators of each half
    expected: Mapping[str, dict[str, int]]

    def run(self, half: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        session = self.sessions[half]
        taken, given = [[value.name for value in ends] for ends in (session.get_inputs(), session.get_outputs())]
        return dict(zip(given, session.run(None, {name: feeds[name] for name in taken}), strict=True))


@pytest.fixture(scope="module", params=_GRAPHS)
def graphs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Graphs:
    source, layers, ops, release, encoder, decoder = _GRAPHS[request.param]
    folder, reference = tmp_path_factory.mktemp("checkpoint"), None
    if source in ("post", "pre"):
        model = _seq2seq("post" if source == "post" else "pre", layers)
    else:
        reference = _saved(folder, source, encoder_layers=1, decoder_layers=layers)
        model = load(str(folder))
    parts = halves(FoldConstants().call(export(cached_form(model), Target.parse(release, ops))).model)
    held = {name: Counter(node.op_type for node in part.graph) for name, part in parts.items()}
    sessions = {name: _session(part) for name, part in parts.items()}
    return _Graphs(model, reference, sessions, held, {"encoder": encoder, "decoder": decoder})


def _session(graph: ir.Model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    file = ir.to_proto(graph).SerializeToString()
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def test_the_halves_read_with_a_cache_what_eager_reads_without(graphs: _Graphs) -> None:
    assert graphs.model.cache is not None
    for batch, tokens, decoded in ((1, 1, 1), (3, 17, 9), (1, 40, 12)):
        given = _drawn(batch, tokens, decoded)
        if batch == 3 and graphs.model.padding == "any":
            given["attention_mask"][2] = 0
        arrays = {name: tensor.numpy() for name, tensor in given.items()}
        runs = functools.partial(graphs.run, "encoder"), functools.partial(graphs.run, "decoder")
        found = runtime_generate.logits_with_cache(runs, dataclasses.asdict(graphs.model.cache), arrays)
        assert_equal(torch.from_numpy(found["logits"]), _logits(graphs.model.module, given))


def test_a_cache_with_room_is_read_and_kept(graphs: _Graphs) -> None:
    """As it is bound when past and present share one buffer of the whole generation's length."""
    cache, given = graphs.model.cache, _drawn(2, 9, 6)
    assert cache is not None
    expected = _logits(graphs.model.module, given)
    arrays = {name: tensor.numpy() for name, tensor in given.items()}
    cross = graphs.run("encoder", arrays)
    past = {name: np.full((2, cache.heads, 20, cache.head_dim), 7.0, np.float32) for name in cache.names("past")}
    for start, end in ((0, 4), (4, 5), (5, 6)):
        feeds: dict[str, np.ndarray] = {
            "attention_mask": arrays["attention_mask"],
            "decoder_input_ids": arrays["decoder_input_ids"][:, start:end],
            "decoder_attention_mask": np.ones((2, end), np.int64),
            "logits_at": np.arange(end - start),
        }
        found = graphs.run("decoder", feeds | cross | past)
        assert_equal(torch.from_numpy(found["logits"]), expected[:, start:end])
        past = {name: found[name.replace("past", "present")] for name in past}
        assert {array.shape[2] for array in past.values()} == {20}


def test_the_halves_are_made_of_these_attentions(graphs: _Graphs) -> None:
    """And read no size where all are fused: what is bound may be larger than what is in it."""
    for half, expected in graphs.expected.items():
        assert {name: count for name, count in graphs.held[half].items() if "Attention" in name} == expected
        fused = "GroupQueryAttention" in expected
        assert not (fused and graphs.held[half]["Shape"])


def test_generated_ids_are_those_of_transformers_and_of_eager(graphs: _Graphs) -> None:
    """Greedy for all; four beams where transformers has the model."""
    model, given = graphs.model, _drawn(3, 9, 1)
    assert model.cache is not None and model.generation is not None
    asked = {**dataclasses.asdict(model.generation), "cache": dataclasses.asdict(model.cache)}
    generator = runtime_generate.Generator(graphs.sessions, asked)
    sources = [ids[mask != 0].tolist() for ids, mask in zip(given["input_ids"], given["attention_mask"], strict=True)]
    for beams in (1,) if graphs.reference is None else (1, 4):
        found = generator.generate(sources, runtime_generate.Options(max_new_tokens=12, beams=beams))
        expected = _greedy(model, given) if graphs.reference is None else _continued(graphs.reference, given, beams)
        assert found == [_until(row, model.generation.eos) for row in expected]


def _greedy(model: EagerModel, given: Mapping[str, Tensor]) -> list[list[int]]:
    assert model.generation is not None and model.generation.start is not None
    ids = torch.full((len(given["input_ids"]), 1), model.generation.start)
    for _ in range(12):
        chosen = _logits(model.module, {**given, "decoder_input_ids": ids})[:, -1:].argmax(dim=-1)
        ids = torch.cat((ids, chosen), dim=1)
    found: list[list[int]] = ids[:, 1:].tolist()
    return found


def _continued(reference: Any, given: Mapping[str, Tensor], beams: int) -> list[list[int]]:
    source = {name: given[name] for name in ("input_ids", "attention_mask")}
    found: list[list[int]] = reference.generate(**source, max_new_tokens=12, num_beams=beams)[:, 1:].tolist()
    return found


def _until(ids: list[int], ends: tuple[int, ...]) -> list[int]:
    return ids[: next((place for place, token in enumerate(ids) if token in ends), len(ids))]


# What facebook/bart-large-cnn and Helsinki-NLP/opus-mt-en-de hold beside the sizes.
_OLD_KEYS: dict[str, Any] = {
    "_num_labels": 3,
    "activation_dropout": 0.0,
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "attention_dropout": 0.0,
    "bad_words_ids": [[58100]],
    "bos_token_id": 0,
    "classif_dropout": 0.0,
    "classifier_dropout": 0.0,
    "decoder_layerdrop": 0.0,
    "early_stopping": True,
    "encoder_layerdrop": 0.0,
    "eos_token_id": 2,
    "extra_pos_embeddings": 2,
    "force_bos_token_to_be_generated": True,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
    "length_penalty": 2.0,
    "max_length": 142,
    "min_length": 56,
    "no_repeat_ngram_size": 3,
    "normalize_before": False,
    "num_beams": 4,
    "num_hidden_layers": 2,
    "output_past": True,
    "prefix": " ",
    "replacing_rate": 0,
    "student_decoder_layers": None,
    "task_specific_params": {"summarization": {"length_penalty": 1.0}},
    "use_cache": True,
}


def _config(family: str, **changes: Any) -> dict[str, Any]:
    architecture, sizes = _FAMILIES[family]
    return {**sizes, "architectures": [architecture], "model_type": family, **_OLD_KEYS, **changes}


def test_the_keys_of_old_checkpoints_are_read() -> None:
    bart = Bart.from_config(_config("bart", normalize_embedding=True, static_position_embeddings=False), None, ())
    assert (bart.decoder_layers, bart.task) == (3, "text2text-generation")
    marian = Marian.from_config(_config("marian", normalize_embedding=False, static_position_embeddings=True), None, ())
    assert (marian.scale_embedding, marian.activation_function) == (True, "swish")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalize_before": True}, "normalize_before is True; bart supports False only"),
        ({"normalize_embedding": False}, "normalize_embedding is False; bart supports True only"),
        ({"static_position_embeddings": True}, "static_position_embeddings is True; bart supports False only"),
        ({"rotary": True}, "rotary is True, which bart does not support"),
        ({"activation_function": "tanh"}, "activation_function is 'tanh'; supported: gelu, .*swish"),
        ({"decoder_attention_heads": 5}, "d_model 48 does not divide by decoder_attention_heads 5"),
        ({"num_hidden_layers": 12}, "num_hidden_layers is 12, but encoder_layers is 2"),
        ({"encoder_layers": 0, "num_hidden_layers": 0}, "encoder_layers is 0; it must be in 1 to 1000"),
        ({"decoder_ffn_dim": 0}, "decoder_ffn_dim is 0; it must be at least 1"),
        ({"architectures": ["BartModel"]}, "architectures is .'BartModel'.; supported: BartForConditionalGeneration"),
    ],
)
def test_a_config_that_asks_for_other_arithmetic_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        Bart.from_config(_config("bart", **changes), None, ())
