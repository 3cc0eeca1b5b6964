"""Compression of models with a cache: passes look into the graph as it reads a prompt, and are judged through it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

from tx_export import plugins
from tx_export._cached_form import cached_form
from tx_export._fake_quantize import fake_quantized
from tx_export._judged_passes import context_of
from tx_export.errors import PassError
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.metrics import Budget
from tx_export.models.lm import Lm
from tx_export.models.seq2seq import Seq2seq
from tx_export.passes import Context, Coverage, Pipeline
from tx_export.quantize._calibration import observe
from tx_export.quantize._prompt import open_prompt
from tx_export.quantize.dynamic_int8 import DynamicInt8
from tx_export.spec import EagerModel
from tx_export.testing import eager_model, tiny_tokenizer
from tx_export.verify import default_lines, grid

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_SIZES, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", {"vocab_size": 300, "n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "qwen2": ("Qwen2", {**_SIZES, **_WINDOW}),
}
_LOSSLESS = "fold_constants fuse_gelu fuse_fast_gelu merge_views"
_PASSES = (
    "dynamic_int8",
    "static_int8",
    "smooth dynamic_int8",
    "round_weights static_int8",
    "blockwise{bits=8}",
    "blockwise{bits=4}",
    "blockwise{bits=4, method=round}",
    "float16",
    "float16{keep_io=false}",
)


class Built(NamedTuple):
    """A decoder, its graph with a cache, and what passes are given."""

    model: EagerModel
    graph: ir.Model
    context: Context


def _checkpoint(folder: Path, family: str) -> None:
    """Of weights so large that neither softmax nor activation is nearly linear."""
    torch.manual_seed(0)
    name, config = _FAMILIES[family]
    made = getattr(transformers, f"{name}Config")(**config)
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(made).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_gain = any(kind in parameter_name for kind in ("norm", "ln_")) and parameter_name.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * 0.2 + is_gain)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tiny_tokenizer(), encoding="utf-8")


@pytest.fixture(scope="module", params=_FAMILIES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("checkpoint") / request.param
    _checkpoint(folder, request.param)
    return _built(load(str(folder)))


@pytest.fixture(scope="module")
def translator() -> Built:
    torch.manual_seed(0)
    spec = Seq2seq(vocab_size=200, d_model=32, num_layers=2, num_heads=4, d_ff=48, max_length=40)
    plain = eager_model(spec.build(), spec.inputs(), spec.outputs(), task=spec.task)
    built = _built(dataclasses.replace(plain, cache=spec.cache(), generation=spec.generation()))
    feeds = [case.feeds for case in grid(built.model, 17) if case.mask == "ragged"]
    return built._replace(context=dataclasses.replace(built.context, feeds=feeds[-2:]))


def _built(model: EagerModel) -> Built:
    graph = export(cached_form(model), Target.parse(None, "fused"))
    context = context_of(model, default_lines()[:24], "cpu")
    _run(_LOSSLESS, graph, context)
    return Built(model, graph, context)


def _run(text: str, graph: ir.Model, context: Context) -> list[tuple[str, Coverage]]:
    found: list[tuple[str, Coverage]] = []
    pipeline = Pipeline.parse(text, lambda name: plugins.find("pass", name))
    pipeline.run_graph(graph, context, (), lambda item, outcome: found.append((item.name(), outcome.coverage)))
    return found


def _drift(graph: ir.Model, built: Built) -> Mapping[str, float]:
    """From eager, read as a generation does: a prompt, a part and single steps through the cache."""
    assert built.context.drift is not None
    return built.context.drift(built.context.open(graph), built.context.feeds[-2:])


@pytest.mark.parametrize("text", _PASSES)
def test_a_decoder_read_through_its_cache_keeps_the_budget_of_each_pass(text: str, decoder: Built) -> None:
    graph = decoder.graph.clone()
    (name, coverage), *_ = reversed(_run(text, graph, decoder.context))
    assert [left.name for left in coverage.left] == (["speed on CPUs"] if name == "float16" else [])
    item = plugins.find("pass", name).parse(text.rpartition("{")[2].rstrip("}") if text.endswith("}") else "")
    limit = Budget.parse(item.budget).sqnr_db
    found = _drift(graph, decoder)["sqnr_db"]
    assert limit is not None
    assert limit <= found < 80  # above it nothing would have been rounded


def test_bfloat16_of_a_decoder_is_refused_for_a_cpu(decoder: Built) -> None:
    with pytest.raises(PassError, match="ONNX Runtime's CPU provider has no bfloat16 arithmetic"):
        _run("bfloat16", decoder.graph.clone(), decoder.context)


@pytest.mark.parametrize("text", ["blockwise{bits=4}", "dynamic_int8", "static_int8"])
def test_embedding_and_head_are_one_stored_weight_where_they_are_tied(text: str, decoder: Built) -> None:
    graph = decoder.graph.clone()
    _run(text, graph, decoder.context)
    arrays = {value.name: value.const_value.numpy() for value in graph.graph.initializers.values() if value.const_value}
    large = [array for array in arrays.values() if 300 in array.shape and array.size > 300 * 24]
    assert {array.dtype for array in large} <= {np.dtype(np.int8), np.dtype(np.uint8)}
    assert len(large) == (2 if decoder.model.family == "qwen2" else 1)


def test_calibration_sees_what_eager_computes_at_real_positions(decoder: Built) -> None:
    head = next(node for node in reversed(list(decoder.graph.graph)) if node.op_type == "MatMul")
    (x,) = head.inputs[:1]
    assert x is not None
    feeds = decoder.context.feeds[-1]
    context = dataclasses.replace(decoder.context, feeds=[feeds])
    rows = np.concatenate([batch[x.name or ""] for batch in observe(decoder.graph, [x], context)])
    ids, mask = (torch.from_numpy(feeds[name]) for name in ("input_ids", "attention_mask"))
    with torch.no_grad():
        module: Any = decoder.model.module
        hidden, _ = module.hidden(ids, mask, [None] * len(module.layers))
    # The order of float32 sums differs between the runtimes.
    np.testing.assert_allclose(rows, hidden[mask != 0].numpy(), atol=1e-4)


def test_a_graph_of_two_halves_is_read_in_one_run(translator: Built) -> None:
    run = open_prompt(translator.graph, translator.context)
    for feeds in translator.context.feeds:
        inputs = (torch.from_numpy(feeds[tensor.name]) for tensor in translator.model.inputs)
        with torch.no_grad():
            expected = translator.model.module(*inputs).numpy()
        np.testing.assert_allclose(run(feeds)["logits"], expected, atol=1e-4)


@pytest.mark.parametrize("text", ["dynamic_int8", "static_int8", "blockwise{bits=8}", "smooth static_int8", "float16"])
def test_an_encoder_decoder_read_through_its_cache_keeps_the_budget_of_each_pass(text: str, translator: Built) -> None:
    graph = translator.graph.clone()
    (name, coverage), *_ = reversed(_run(text, graph, translator.context))
    assert {left.name for left in coverage.left} <= {"model.embedding.positions.table", "speed on CPUs"}
    limit = Budget.parse(plugins.find("pass", name).parse("bits=8" if name == "blockwise" else "").budget).sqnr_db
    assert limit is not None
    assert limit <= _drift(graph, translator)["sqnr_db"] < 80


def test_training_for_8_bits_is_refused_where_the_graph_joins_products_of_a_layer() -> None:
    module = Lm(vocab_size=99, d_model=16, num_layers=1, num_heads=2, d_ff=16).build()
    with pytest.raises(PassError, match=r"^layers\.0\.attention is of the class CausalSelfAttention, whose products"):
        fake_quantized(module, DynamicInt8())
