"""The tiny models and graph helpers do what tests rely on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tx_export.testing import (
    Architecture,
    graph_from_text,
    matmul_model,
    run_graph,
    tiny_bert_folder,
    tiny_classifier,
    tiny_embedder,
    tiny_tokenizer,
)


def test_matmul_model_multiplies_by_its_weight() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(5, 4)).astype(np.float32), rng.normal(size=(4, 3)).astype(np.float32)
    y = run_graph(matmul_model(weight), {"x": x})["y"]
    # Reference: NumPy in float64. A dot product of 4 in float32 is off by at most 4 roundings of 6e-8 of sum|x||w|.
    bound = 4 * 6e-8 * (np.abs(x) @ np.abs(weight)) + 1e-12
    assert (np.abs(y - x.astype(np.float64) @ weight.astype(np.float64)) <= bound).all()


def test_graph_from_text_runs_all_outputs_by_name() -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y, float[2] z) { y = Neg(x) z = Abs(x) }'
    )
    found = run_graph(graph_from_text(text), {"x": np.array([1, -2], np.float32)})
    assert {name: array.tolist() for name, array in found.items()} == {"y": [-1, 2], "z": [1, 2]}


def test_the_same_seed_gives_the_same_model_and_leaves_the_global_seed_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second, other = tiny_classifier(), tiny_classifier(), tiny_classifier(seed=1)
    assert torch.equal(torch.rand(1), expected)
    states = [model.module.state_dict() for model in (first, second, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["head.weight"], states[2]["head.weight"])


def test_tiny_models_run_on_what_their_tokenizer_gives() -> None:
    for model in (tiny_classifier(), tiny_embedder()):
        assert model.text is not None
        ids = torch.tensor([Tokenizer.from_str(model.text.tokenizer).encode("a nice film").ids])
        output = model.module(ids, torch.ones_like(ids))
        assert output.shape[0] == 1
        assert bool(output.isfinite().all())


def test_the_tokenizer_has_the_size_asked_for_and_knows_every_english_word() -> None:
    tokenizer = Tokenizer.from_str(tiny_tokenizer(300))
    assert tokenizer.get_vocab_size() == 300
    encoding = tokenizer.encode("What, 42 zebras?", "Yes.")
    assert "[UNK]" not in encoding.tokens
    assert (encoding.tokens[0], encoding.tokens[-1]) == ("[CLS]", "[SEP]")
    assert set(encoding.type_ids) == {0, 1}


@pytest.mark.parametrize(
    "architecture",
    ["BertModel", "BertForSequenceClassification", "BertForTokenClassification", "BertForMaskedLM"],
)
def test_transformers_reads_the_bert_folder_without_missing_or_unexpected_weights(
    architecture: Architecture, tmp_path: Path
) -> None:
    import transformers

    folder = tiny_bert_folder(tmp_path / "bert", architecture)
    _, report = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def test_sentence_transformers_pools_as_the_folder_says(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    vectors = {}
    for pooling in (("mean",), ("cls",), ("max",), ("mean", "normalize")):
        folder = tiny_bert_folder(tmp_path / "-".join(pooling), pooling=pooling)
        model = SentenceTransformer(str(folder), device="cpu")
        tokens = model.encode("a nice film", output_value="token_embeddings").numpy()
        vectors[pooling] = model.encode("a nice film")
        expected = {"mean": tokens.mean(axis=0), "cls": tokens[0], "max": tokens.max(axis=0)}[pooling[0]]
        if "normalize" in pooling:
            expected = expected / np.linalg.norm(expected)
        # The mean of at most 32 numbers below 10 in float32: 32 roundings of 6e-8 of their size.
        np.testing.assert_allclose(vectors[pooling], expected, rtol=0, atol=32 * 6e-8 * 10)
