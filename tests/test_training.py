"""Training: the formulas, the equalities that the options promise, and the errors."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models
from torch import nn

from tx_export._training_loop import fit
from tx_export._training_steps import evaluate, gradients, recomputing, smoothed_loss, warmup_rate
from tx_export._training_text import Rows, encode, epoch_batches, read_examples, read_tokenizer, train_tokenizer
from tx_export.errors import TxExportError
from tx_export.models.classifier import Classifier
from tx_export.models.embedder import Embedder
from tx_export.training import LoopOptions, TrainOptions, TrainRecord, TrainResult, train

_EPS = torch.finfo(torch.float32).eps
_SPEC = Classifier(vocab_size=90, max_length=16, d_model=16, num_layers=2, num_heads=2, d_ff=32)
_LOOP = LoopOptions(
    epochs=3, warmup=10, rate_factor=0.5, word_dropout=0.1, average=0.9, patience=9, checkpoint_every=2, batch_size=8
)


class _KilledError(Exception):
    """Stands for a process that ends in the middle of a run."""


def _ignore(record: TrainRecord) -> None: ...


def _planted(path: Path, flipped: bool = False) -> Path:
    """64 sentences; the label is the word good or bad among neutral ones."""
    generator = torch.Generator().manual_seed(3)
    nouns, lines = ["film", "book", "meal", "song", "day", "talk"], []
    for i in range(64):
        first, last = (nouns[int(torch.randint(len(nouns), (), generator=generator))] for _ in range(2))
        label = ["negative", "positive"][(i + flipped) % 2]
        lines.append(f"{label}\tthe {first} was {['bad', 'good'][i % 2]}{' like the ' + last if i % 3 else ''}\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _options(folder: Path, name: str = "out", loop: LoopOptions = _LOOP) -> TrainOptions:
    return TrainOptions(_SPEC, _planted(folder / "train.tsv"), folder / name, loop=loop)


def _rows(count: int) -> Rows:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 12, (count,), generator=generator).tolist()
    ids = [torch.randint(4, _SPEC.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return Rows(ids, torch.randint(2, (count,), generator=generator), torch.rand(count, generator=generator))


def _module(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return dataclasses.replace(_SPEC, dropout=dropout).build().train()


def _gradients(module: nn.Module, options: LoopOptions, count: int = 16) -> torch.Tensor:
    torch.manual_seed(5)
    module.zero_grad()
    gradients(module, _rows(count), range(count), options)
    return torch.cat([weight.grad.flatten() for weight in module.parameters() if weight.grad is not None])


def test_the_rate_rises_linearly_to_the_warm_up_and_falls_as_the_inverse_root() -> None:
    # The article's base model: 512 wide, 4,000 steps; its peak is (512 * 4000)^-0.5 = 6.99e-4.
    assert warmup_rate(4000, 512, 4000) == pytest.approx((512 * 4000) ** -0.5, rel=1e-12)
    assert warmup_rate(1, 512, 4000) == pytest.approx(512**-0.5 * 4000**-1.5, rel=1e-12)
    assert warmup_rate(1000, 512, 4000) == pytest.approx(warmup_rate(4000, 512, 4000) / 4, rel=1e-12)
    assert warmup_rate(16000, 512, 4000, factor=3) == pytest.approx(3 * warmup_rate(4000, 512, 4000) / 2, rel=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_smoothed_loss_of_sequences_is_torchs_with_padding_left_out(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 5, generator=generator) * 3
    targets = torch.randint(5, (3, 7), generator=generator)
    targets[:, 5:] = -100
    # Reference: torch's own. A sum of 15 terms of 5 products each is rounded at most 20 times.
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing, ignore_index=-100, reduction="sum"
    )
    assert abs(smoothed_loss(logits, targets, smoothing) - expected) <= 20 * _EPS * expected


def test_confidence_is_the_targets_probability_and_the_rest_is_shared() -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]])
    probabilities = torch.tensor([[0.7, 0.15, 0.15], [0.3, 0.4, 0.3]])
    expected = nn.functional.cross_entropy(logits, probabilities, label_smoothing=0.2, reduction="sum")
    loss = smoothed_loss(logits, torch.tensor([0, 1]), 0.2, confidence=torch.tensor([0.7, 0.4]))
    assert abs(loss - expected) <= 20 * _EPS * expected


def test_accumulated_micro_batches_give_the_gradient_of_the_whole_batch() -> None:
    module, options = _module(dropout=0.0), LoopOptions(batch_size=16)
    whole = _gradients(module, options)
    parts = _gradients(module, dataclasses.replace(options, accumulation=4))
    # Only the order of sums over 16 rows of up to 11 tokens differs; a mean per micro-batch would be 3 whole apart.
    assert (parts - whole).abs().max() <= 16 * 11 * _EPS * whole.abs().max()


def test_recomputed_activations_give_the_same_gradients_bit_for_bit() -> None:
    module, options = _module(dropout=0.3), LoopOptions(batch_size=16)
    kept = _gradients(module, options)
    assert torch.equal(_gradients(module, dataclasses.replace(options, activations="recompute")), kept)


def test_recomputing_runs_each_layer_again_in_the_backward_pass() -> None:
    module, runs = _module(dropout=0.0), []
    layers = next(stack for stack in module.modules() if isinstance(stack, nn.ModuleList))
    for layer in layers:
        layer.attention.register_forward_hook(lambda *_: runs.append(1))  # type: ignore[union-attr]
    ids = torch.randint(4, 90, (2, 5))
    with recomputing(module):
        out = module(ids, torch.ones_like(ids))
    assert len(runs) == 2
    out.sum().backward()
    assert len(runs) == 4


def test_bfloat16_gives_gradients_near_those_of_float32_and_keeps_weights_and_gradients_in_float32() -> None:
    module, options = _module(dropout=0.0), LoopOptions(batch_size=16)
    exact = _gradients(module, options)
    rough = _gradients(module, dataclasses.replace(options, precision="bfloat16"))
    assert rough.dtype == torch.float32
    # bfloat16 rounds by 2^-9 at each of about 20 products and sums on the way through two layers and back.
    assert 0 < (rough - exact).norm() <= 20 * 2**-9 * exact.norm()


def test_a_step_clips_the_gradient_and_moves_the_weights_by_the_rate(tmp_path: Path) -> None:
    module = _module(dropout=0.0)
    before = torch.cat([weight.detach().flatten().clone() for weight in module.parameters()])
    options, rows = LoopOptions(batch_size=16, epochs=1, warmup=10, clip=0.01), _rows(16)
    fit(module, 16, (rows, rows), options, (tmp_path / "checkpoint.pt", "any"), _ignore)
    after = torch.cat([weight.detach().flatten() for weight in module.parameters()])
    gradient = torch.cat([weight.grad.flatten() for weight in module.parameters() if weight.grad is not None])
    # torch divides by the norm plus 1e-6, and sums about 10,000 squares.
    assert gradient.norm() == pytest.approx(0.01, rel=1e-4)
    # Adam's first step is rate * g / (|g| + 1e-9), then rounded to the weight's precision.
    rate = warmup_rate(1, 16, 10)
    slack = rate * 1e-9 / gradient.abs().max() + _EPS * before.abs().max()
    assert abs((after - before).abs().max() - rate) <= slack + 4 * _EPS * rate


def test_each_epoch_holds_every_row_once_in_another_order_and_pads_little() -> None:
    lengths = torch.randint(3, 60, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    first, second = epoch_batches(lengths, 32, 0, 0), epoch_batches(lengths, 32, 0, 1)
    assert sorted(row for batch in first for row in batch) == list(range(1000))
    assert first != second
    padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in first)
    # Sorted lengths spread over 57 values in 32 batches: a batch spans about 2, so padding adds under 1 token a row.
    assert padded - sum(lengths) <= 2 * 1000


def test_a_tokenizer_is_a_function_of_its_texts() -> None:
    texts = [f"word{i} and wordy{i % 7} things, number {i}" for i in range(200)]
    tokenizers = [train_tokenizer(texts, 120) for _ in range(3)]
    assert len({tokenizer.to_str() for tokenizer in tokenizers}) == 1
    assert [tokenizers[0].id_to_token(i) for i in range(4)] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    encoded = tokenizers[0].encode("Word1 THINGS")
    assert (encoded.tokens[0], encoded.tokens[-1], "[UNK]" in encoded.tokens) == ("[CLS]", "[SEP]", False)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return train(_options(tmp_path_factory.mktemp("whole")), _ignore)


def test_a_killed_run_continues_to_the_weights_of_a_run_in_one_go(uninterrupted: TrainResult, tmp_path: Path) -> None:
    def killing(record: TrainRecord) -> None:
        if record.step == 13:  # in the second epoch of 8 batches, one step after a checkpoint
            raise _KilledError

    with pytest.raises(_KilledError):
        train(_options(tmp_path), killing)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint.pt"]
    steps: list[int] = []
    train(_options(tmp_path), lambda record: steps.append(record.step))
    assert steps[0] == 13
    for name in ("model.safetensors", "tokenizer.json", "training.json"):
        assert (tmp_path / "out" / name).read_bytes() == (uninterrupted.folder / name).read_bytes()


def test_the_same_seed_gives_the_same_weights_and_another_gives_others(
    uninterrupted: TrainResult, tmp_path: Path
) -> None:
    again = train(_options(tmp_path), _ignore)
    other = train(_options(tmp_path, "other", dataclasses.replace(_LOOP, seed=1)), _ignore)
    weights = [(result.folder / "model.safetensors").read_bytes() for result in (uninterrupted, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_training_leaves_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    train(_options(tmp_path, loop=dataclasses.replace(_LOOP, epochs=1)), _ignore)
    assert torch.rand(1) == expected


def test_a_planted_rule_is_learnt_without_error(tmp_path: Path) -> None:
    result = train(_options(tmp_path, loop=dataclasses.replace(_LOOP, epochs=25, word_dropout=0.0)), _ignore)
    assert result.metrics["accuracy"] == 1.0
    assert isinstance(result.spec, Classifier)
    module, tokenizer = result.spec.build().eval(), read_tokenizer(result.folder / "tokenizer.json")
    module.load_state_dict(safetensors.torch.load_file(result.folder / "model.safetensors"))
    ids = torch.tensor([tokenizer.encode(text).ids for text in ("the meal was bad", "the meal was good")])
    assert module(ids, torch.ones_like(ids)).argmax(dim=-1).tolist() == [0, 1]


def test_training_stops_early_and_keeps_the_weights_that_did_best(tmp_path: Path) -> None:
    # The held-out labels are the wrong way round, so learning makes held-out accuracy fall.
    held_out, seen = _planted(tmp_path / "held-out.tsv", flipped=True), list[TrainRecord]()
    loop = dataclasses.replace(_LOOP, epochs=40, patience=3)
    result = train(dataclasses.replace(_options(tmp_path, loop=loop), held_out=held_out), seen.append)
    judged = [record for record in seen if record.held_out is not None]
    assert len(judged) < 40 and judged[-1].step == result.steps
    best = max(judged, key=lambda record: (record.held_out or {})["accuracy"])
    assert (best.step, best.held_out) == (result.best_step, result.metrics)
    assert judged[-1].held_out != result.metrics
    assert isinstance(result.spec, Classifier)
    module = result.spec.build()
    module.load_state_dict(safetensors.torch.load_file(result.folder / "model.safetensors"))
    tokenizer = read_tokenizer(result.folder / "tokenizer.json")
    rows = encode(tokenizer, read_examples(held_out), result.spec.labels, result.spec.max_length)
    assert evaluate(module, rows, _LOOP.batch_size) == result.metrics


def test_the_header_holds_the_configuration_and_the_record_holds_the_run(uninterrupted: TrainResult) -> None:
    with safe_open(uninterrupted.folder / "model.safetensors", "pt") as weights:
        config = json.loads(weights.metadata()["config"])
    assert Classifier(**(config | {"labels": tuple(config["labels"])})) == uninterrupted.spec
    record = json.loads((uninterrupted.folder / "training.json").read_text(encoding="utf-8"))
    assert record["metrics"] == uninterrupted.metrics
    assert (record["split"], record["examples"]) == ("seeded 0.1", {"train": 58, "held_out": 6})
    assert record["loop"] == dataclasses.asdict(_LOOP)


def test_training_starts_from_given_weights(tmp_path: Path) -> None:
    start = {"head.bias": torch.tensor([50.0, -50.0])}
    safetensors.torch.save_file(start, tmp_path / "start.safetensors")
    first: list[float] = []
    options = dataclasses.replace(
        _options(tmp_path, loop=dataclasses.replace(_LOOP, epochs=1, label_smoothing=0.0)),
        initial=tmp_path / "start.safetensors",
    )
    train(options, lambda record: first.append(record.loss))
    # The bias puts all on one label, so the loss of a half-and-half batch is about half of 100; else it would be ln 2.
    assert first[0] > 10 > math.log(2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no examples"),
        (b"positive\tfine\nnegative no tab\n", "line 2: 1 column"),
        (b"positive\tfine\n\tno label\n", "line 2: the label is empty"),
        (b"positive\tfine\nnegative\t \n", "line 2: the text is empty"),
        (b"positive\tfine\nnegative\t\xff\n", "line 2: not UTF-8"),
        (b"positive\tfine\tmaybe\n", "line 1: confidence 'maybe' is not a number"),
        (b"positive\tfine\t1.5\n", "line 1: confidence 1.5 is outside"),
        (b"positive\tfine\tnan\n", "line 1: confidence nan is outside"),
        (b"positive\tfine\npositive\tgood\n", "the only label is 'positive'"),
    ],
)
def test_a_bad_line_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.tsv").write_bytes(content)
    with pytest.raises(TxExportError, match=message):
        train(TrainOptions(_SPEC, tmp_path / "bad.tsv", tmp_path / "out"), _ignore)
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TxExportError, match=r"absent\.tsv: cannot be read: No such file"):
        train(TrainOptions(_SPEC, tmp_path / "absent.tsv", tmp_path / "out"), _ignore)


def test_a_held_out_label_that_training_never_saw_is_refused(tmp_path: Path) -> None:
    (tmp_path / "held-out.tsv").write_text("neutral\tit is a film\n", encoding="utf-8")
    with pytest.raises(TxExportError, match="held-out label 'neutral' is not in the training data"):
        train(dataclasses.replace(_options(tmp_path), held_out=tmp_path / "held-out.tsv"), _ignore)


def test_a_model_whose_task_needs_more_than_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TxExportError, match="Embedder can't be trained from text alone: its task is sentence-embedding"
    ):
        train(TrainOptions(Embedder(), _planted(tmp_path / "train.tsv"), tmp_path / "out"), _ignore)


def test_a_trained_folder_is_not_written_over(uninterrupted: TrainResult, tmp_path: Path) -> None:
    with pytest.raises(TxExportError, match="already holds a trained model"):
        train(dataclasses.replace(_options(tmp_path), output=uninterrupted.folder), _ignore)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    safetensors.torch.save_file({"head.bias": torch.zeros(3)}, tmp_path / "start.safetensors")
    with pytest.raises(TxExportError, match=r"head\.bias \[3\] does not fit the model; it is \[2\]"):
        train(dataclasses.replace(_options(tmp_path), initial=tmp_path / "start.safetensors"), _ignore)


def test_a_checkpoint_of_other_options_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    def killing(record: TrainRecord) -> None:
        if record.step == 3:
            raise _KilledError

    with pytest.raises(_KilledError):
        train(_options(tmp_path), killing)
    with pytest.raises(TxExportError, match="from other options or data"):
        train(_options(tmp_path, loop=dataclasses.replace(_LOOP, seed=9)), _ignore)
    (tmp_path / "out" / "checkpoint.pt").write_bytes(b"half a file")
    with pytest.raises(TxExportError, match="a damaged checkpoint"):
        train(_options(tmp_path), _ignore)


def test_a_loss_that_is_not_finite_ends_training(tmp_path: Path) -> None:
    safetensors.torch.save_file({"head.bias": torch.tensor([math.inf, 0.0])}, tmp_path / "start.safetensors")
    with pytest.raises(TxExportError, match="step 1: the loss is nan; choose a smaller rate factor"):
        train(dataclasses.replace(_options(tmp_path), initial=tmp_path / "start.safetensors"), _ignore)


def test_word_dropout_needs_the_special_tokens_in_their_place(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"good": 0, "bad": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TxExportError, match=r"tokenizer\.json: word dropout needs \[PAD\], \[UNK\]"):
        train(dataclasses.replace(_options(tmp_path), tokenizer=tmp_path / "tokenizer.json"), _ignore)


def test_an_output_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TxExportError, match="file/out: cannot be written: Not a directory"):
        train(dataclasses.replace(_options(tmp_path), output=tmp_path / "file" / "out"), _ignore)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch_size", 0, "batch_size is 0; it must be at least 1"),
        ("accumulation", 3, "batch_size 32 does not divide by accumulation 3"),
        ("label_smoothing", 1.0, r"label_smoothing is 1.0; it must be in \[0, 1\)"),
        ("clip", 0.0, "clip must be above 0"),
    ],
)
def test_an_option_out_of_range_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(TxExportError, match=message):
        dataclasses.replace(LoopOptions(), **{field: value})
