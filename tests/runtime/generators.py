"""Tiny random checkpoints of transformers, and a generator over the graph of each; one export for each in a process."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
import transformers

from tx_export._cached_form import cached_form
from tx_export._halves import halves
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.runtime_generate import Generator
from tx_export.spec import GenerationSpec

__all__ = ["END", "VOCABULARY", "Tiny", "continued", "prompts", "tiny"]

VOCABULARY, END = 300, 2
_LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": END,
}
_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "pad_token_id": 1,
    "eos_token_id": END,
    "decoder_start_token_id": END,
    "forced_eos_token_id": END,
}
_T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
_T5_IDS = {"pad_token_id": 0, "eos_token_id": END, "decoder_start_token_id": 0}
_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {  # of transformers: configuration, model, keys
    "llama": ("LlamaConfig", "LlamaForCausalLM", _LLAMA),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _LLAMA | _WINDOW),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": END},
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", _BART | {"forced_bos_token_id": 7}),
    "marian": ("MarianConfig", "MarianMTModel", _BART | {"decoder_start_token_id": 1, "bad_words_ids": [[1]]}),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5 | _T5_IDS | {"feed_forward_proj": "gated-gelu"}),
}


@dataclass(frozen=True)
class Tiny:
    """A checkpoint as transformers runs it, and what a generator of ours needs."""

    theirs: Any
    graphs: Mapping[str, bytes]
    generation: Mapping[str, Any]

    @functools.cached_property
    def sessions(self) -> dict[str, Any]:
        return {name: _session(graph) for name, graph in self.graphs.items()}

    def generator(self, **generation: Any) -> Generator:
        """A new one; `generation` replaces what the checkpoint asks for."""
        return Generator(self.sessions, {**self.generation, **generation})


@functools.cache
def tiny(family: str, ops: Literal["fused", "standard"] = "fused") -> Tiny:
    """Its weights are so large that nothing is nearly linear, and that the likeliest token is likelier by far."""
    config_name, model_name, keys = _FAMILIES[family]
    torch.manual_seed(0)
    theirs = getattr(transformers, model_name)(getattr(transformers, config_name)(**keys)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            is_gain = any(kind in name for kind in ("norm", "ln_")) and name.endswith("weight")
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + is_gain)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        model = load(folder)
        graph = export(cached_form(model), Target.parse(None, ops))
    graphs = {name: ir.to_proto(half).SerializeToString() for name, half in halves(graph).items()}
    assert model.cache is not None
    told = asdict(model.generation or GenerationSpec()) | {"cache": asdict(model.cache)}
    return Tiny(theirs, graphs, told)


def _session(graph: bytes | Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def prompts(count: int, least: int, most: int, seed: int = 0) -> list[list[int]]:
    """Random ids without special ones, of random lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(8, VOCABULARY, size).tolist() for size in random.integers(least, most + 1, count)]


def continued(theirs: Any, rows: Sequence[Sequence[int]], new: int, **options: Any) -> list[list[int]]:
    """The reference: what transformers' own generate puts behind prompts, or gives for sources, without the end."""
    is_decoder = not theirs.config.is_encoder_decoder
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        real = slice(ids.shape[1] - len(row), None) if is_decoder else slice(len(row))
        ids[place, real], mask[place, real] = torch.tensor(row), 1
    pad = theirs.generation_config.pad_token_id or 0
    found = theirs.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=pad, **options)
    tokens: list[list[int]] = found[:, ids.shape[1] if is_decoder else 1 :].tolist()
    return [row[: row.index(END)] if END in row else row for row in tokens]
