"""Decoders against transformers' own, on tiny random checkpoints made from configs: plain, and built with a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

from tx_export import runtime
from tx_export.compiler import BuildOptions, build
from tx_export.load import load

from .checkpoints import assert_equal, feeds, ours

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPE = {**_LLAMA3, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
_GPT2 = {"vocab_size": 300, "n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 64}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES),
    "llama of every bias, tied, with slowed rotations": (
        "Llama",
        {**_SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": _ROPE},
    ),
    # Heads of 24 channels are turned outside of the fused operator.
    "llama with odd heads": ("Llama", {**_SIZES, "hidden_size": 96, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {**_SIZES, "sliding_window": 5}),
    "qwen2": ("Qwen2", {**_SIZES, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**_SIZES, "head_dim": 32}),
    "gpt2": ("GPT2", {**_GPT2, "bos_token_id": 1, "eos_token_id": 2}),
}


def _saved(folder: Path, family: str) -> Any:
    """A random model of transformers, saved; its weights are large, so that no activation is nearly linear."""
    torch.manual_seed(0)
    name, config = _FAMILIES[family]
    made = getattr(transformers, f"{name}Config")(**config, attn_implementation="eager")
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(made).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_gain = any(kind in parameter_name for kind in ("norm", "ln_")) and parameter_name.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * 0.2 + is_gain)
    model.save_pretrained(folder)
    return model


def _theirs(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """With positions counted from the first real token, as transformers' generate gives them."""
    positions = (given["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        out: torch.Tensor = model(**given, position_ids=positions).logits
    return out


@pytest.mark.parametrize("family", _FAMILIES)
def test_logits_equal_transformers_with_padding_on_either_side(family: str, tmp_path: Path) -> None:
    reference = _saved(tmp_path, family)
    model = load(str(tmp_path))
    assert (model.task, model.padding) == ("text-generation", "any")
    for batch, tokens in ((1, 1), (2, 2), (4, 17), (1, 64)):
        for kind in ("full", "right", "left"):
            given = feeds(model, batch, tokens, kind)
            assert_equal(ours(model, given), _theirs(reference, given), given["attention_mask"])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_b003_b048_rows_padded_on_the_left_are_those_rows_alone(family: str, tmp_path: Path) -> None:
    _saved(tmp_path, family)
    model = load(str(tmp_path))
    ids = torch.randint(0, 300, (3, 12), generator=torch.Generator().manual_seed(2))
    lengths = (12, 5, 2)
    mask = torch.stack([(torch.arange(12) >= 12 - length).to(torch.int64) for length in lengths])
    together = ours(model, {"input_ids": ids, "attention_mask": mask})
    assert together.isfinite().all()
    for row, length in enumerate(lengths):
        alone = {"input_ids": ids[row : row + 1, -length:], "attention_mask": mask[row : row + 1, -length:]}
        assert_equal(together[row : row + 1, -length:], ours(model, alone))


@pytest.mark.parametrize("family", _FAMILIES)
def test_b160_b161_b162_the_artifact_reads_with_a_cache_what_transformers_reads_without(
    family: str, tmp_path: Path
) -> None:
    reference = _saved(tmp_path / "checkpoint", family)
    folder = build(BuildOptions(source=str(tmp_path / "checkpoint"), output=tmp_path / "built", quantize="none"))
    artifact, model = runtime.Model(folder), load(str(tmp_path / "checkpoint"))
    assert runtime.self_test(artifact)["agrees"]
    for batch, tokens in ((1, 1), (3, 2), (3, 17), (1, 64)):
        for kind in ("full", "right", "left"):
            given = feeds(model, batch, tokens, kind)
            found = artifact.run_arrays({name: tensor.numpy() for name, tensor in given.items()})["logits"]
            assert_equal(torch.from_numpy(found), _theirs(reference, given), given["attention_mask"])
    if (
        family == "llama"
    ):  # a norm, query key and value, attention, output; norm, gate and up, split, swish, times, down
        nodes = [node.op_type for node in ir.load(folder / "model.onnx").graph]
        assert nodes.count("GroupQueryAttention") == 2
        first, second = (place for place, name in enumerate(nodes) if name == "GroupQueryAttention")
        assert second - first == 10
    assert np.isfinite(found).all()
