"""Distillation: the losses against their formulas, what is matched with what, whole runs, and the errors."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from tx_export import _distillation
from tx_export._distillation import recover
from tx_export._distillation_answers import call
from tx_export._distillation_course import Goal
from tx_export._distillation_losses import agreement, attention_loss, output_loss
from tx_export._distillation_run import DistillOptions, DistillResult, distill
from tx_export._distillation_watch import links, watching
from tx_export._training_text import Batch, read_texts, train_tokenizer
from tx_export.cli import program
from tx_export.errors import LoadError, TxExportError
from tx_export.load import load
from tx_export.models.classifier import Classifier
from tx_export.models.embedder import Embedder
from tx_export.spec import BuiltInSpec, EagerModel
from tx_export.testing import eager_model, tiny_bert_folder, tiny_classifier, tiny_embedder
from tx_export.training import LoopOptions, TrainRecord

_EPS = torch.finfo(torch.float32).eps
_LOOP = LoopOptions(batch_size=8, steps=12, warmup=4, rate_factor=0.2, average=0.5, evaluate_every=4, patience=99)
_SMALL: dict[str, Any] = {"max_length": 32, "d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 16, "dropout": 0.0}


class _KilledError(Exception):
    """Stands for a process that ends in the middle of a run."""


def _ignore(record: TrainRecord) -> None: ...


def _texts(count: int = 40) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    words = [*"abcdefgh", "the", "film", "was", "good", "bad", "long", "dull", "bright", "story", "song", "late"]
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    return [" ".join(words[int(torch.randint(len(words), (), generator=generator))] for _ in range(n)) for n in lengths]


def _plain(folder: Path) -> Path:
    file = folder / "plain.txt"
    file.write_text("".join(f"{text}\n" for text in _texts()), encoding="utf-8")
    return file


def _labelled(folder: Path, labels: tuple[str, str] = ("negative", "positive")) -> Path:
    file = folder / "labelled.tsv"
    file.write_text("".join(f"{labels[i % 2]}\t{text}\n" for i, text in enumerate(_texts())), encoding="utf-8")
    return file


def _options(folder: Path, teacher: EagerModel, student: BuiltInSpec | EagerModel) -> DistillOptions:
    return DistillOptions(teacher, student, (_plain(folder),), folder / "out", loop=_LOOP)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_soft_targets_are_the_cross_entropy_with_the_teachers_less_its_entropy_times_the_square(
    temperature: float,
) -> None:
    s, t = _random(6, 5), _random(6, 5, seed=1)
    target = (t / temperature).softmax(dim=-1)
    # Reference: torch's cross-entropy with probabilities as targets.
    entropy = torch.special.entr(target).sum(dim=-1).mean()
    expected = temperature**2 * (nn.functional.cross_entropy(s / temperature, target) - entropy)
    assert abs(output_loss(s, t, "softmax", temperature) - expected) <= 40 * _EPS * temperature**2 * entropy.clamp_min(
        1
    )


def test_at_a_high_temperature_the_gradient_is_the_difference_of_the_logits() -> None:
    # Hinton et al. 2015, equation 4, of logits with mean zero over N labels: (s - t) / N; what is left falls as 1 / T.
    s, t = (x - x.mean(dim=-1, keepdim=True) for x in (_random(1, 5), _random(1, 5, seed=1)))
    temperature, largest = 1000.0, max(float(s.abs().max()), float(t.abs().max()))
    s.requires_grad_(True)
    output_loss(s, t, "softmax", temperature).backward()  # type: ignore[no-untyped-call]
    assert s.grad is not None
    # The difference of two probabilities near 1/5 carries a rounding of _EPS / 5, which the square and 1 / T multiply.
    bound = 2 * largest**2 / temperature + temperature * 5 * _EPS
    assert (s.grad - (s.detach() - t) / 5).abs().max() <= bound


def test_labels_that_stand_alone_are_matched_one_by_one() -> None:
    s, t = _random(6, 3), _random(6, 3, seed=1)
    target = torch.sigmoid(t)
    binary = nn.functional.binary_cross_entropy_with_logits
    expected = (binary(s, target, reduction="sum") - binary(t, target, reduction="sum")) / 6
    assert abs(output_loss(s, t, "sigmoid") - expected) <= 40 * _EPS * binary(s, target, reduction="sum")
    assert agreement(s, t, "sigmoid") == ((s > 0) == (t > 0)).float().mean()


def test_unit_vectors_differ_by_twice_what_their_cosine_lacks() -> None:
    s, t = (nn.functional.normalize(x, dim=-1) for x in (_random(6, 4), _random(6, 4, seed=1)))
    cosine = nn.functional.cosine_similarity(s, t, dim=-1).mean()
    assert abs(output_loss(s, t, "values") - 2 * (1 - cosine)) <= 20 * _EPS
    assert abs(agreement(s, t, "values") - cosine) <= 20 * _EPS


def test_embeddings_of_another_width_are_alike_when_all_their_cosines_are() -> None:
    t = _random(6, 4)
    turned = t @ torch.linalg.qr(_random(9, 4, seed=1))[0].T  # [6, 9]: the same angles in more dimensions
    # Cosines are sums of at most 9 products, so they differ by 20 roundings, which are squared.
    assert output_loss(turned, t, "values") <= (20 * _EPS) ** 2
    assert output_loss(_random(6, 9, seed=2), t, "values") > 0.1


def test_attention_is_compared_at_real_queries_and_unseen_keys_weigh_nothing() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    s, t = (
        _random(2, 2, 3, 3, seed=seed).masked_fill(mask[:, None, None] == 0, -65504.0).softmax(-1) for seed in (0, 1)
    )
    rows = [(b, q) for b in range(2) for q in range(3) if mask[b, q]]
    # Reference: the formula in float64, query by query, over the keys that are seen.
    losses = [
        (t[b, :, q, : int(mask[b].sum())].double() * (t[b, :, q] / s[b, :, q])[:, : int(mask[b].sum())].double().log())
        .sum(-1)
        .mean()
        for b, q in rows
    ]
    assert abs(attention_loss(s, t, mask) - torch.stack(losses).mean()) <= 100 * _EPS
    s[1, :, 2] = 0.5  # the padding's own query
    assert abs(attention_loss(s, t, mask) - torch.stack(losses).mean()) <= 100 * _EPS


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [(4, 12, [2, 5, 8, 11]), (2, 4, [1, 3]), (3, 3, [0, 1, 2]), (4, 2, [0, 0, 1, 1]), (2, 0, []), (0, 2, [])],
)
def test_layers_are_linked_at_equal_depths(ours: int, theirs: int, expected: list[int]) -> None:
    found = links([torch.ones(1, 2, 3)] * ours, [torch.ones(1, 2, 3)] * theirs, lambda s, t: True)
    assert [link.student for link in found] == list(range(len(expected)))
    assert [link.teacher for link in found] == expected


def test_what_is_seen_is_what_the_layers_compute_and_nothing_stays_behind() -> None:
    model = tiny_classifier()
    batch = Batch(torch.tensor([[2, 9, 8, 3]]), torch.ones(1, 4, dtype=torch.int64), torch.zeros(1), torch.ones(1))
    names = {name: set(vars(part)) for name, part in model.module.named_modules()}
    with torch.no_grad():
        with watching(model.module) as seen:
            (watched,) = call(model.module, model.inputs, batch, batch.input_ids)
        (alone,) = call(model.module, model.inputs, batch, batch.input_ids)
        head = model.module.get_submodule("head")
        # Reference: the head on the first token of the last layer that was seen.
        assert torch.equal(head(seen.hidden[-1][:, 0]), watched)
    assert torch.equal(watched, alone)
    assert len(seen.hidden) == len(seen.weights) == 2
    # Each row of attention weights is a softmax over 4 keys.
    assert all((weights.sum(dim=-1) - 1).abs().max() <= 8 * _EPS for weights in seen.weights)
    assert {name: set(vars(part)) for name, part in model.module.named_modules()} == names
    assert not any(part._forward_hooks for part in model.module.modules())


def test_a_student_of_half_the_width_comes_nearer_in_outputs_and_hidden_states(tmp_path: Path) -> None:
    teacher, judged = tiny_classifier(), []
    loop = dataclasses.replace(_LOOP, steps=60, rate_factor=0.5, evaluate_every=20)
    options = dataclasses.replace(_options(tmp_path, teacher, Classifier(**_SMALL)), loop=loop)
    result = distill(options, lambda record: judged.append(record.held_out) if record.held_out else None)
    assert result.linked == {"hidden": [(1, 2)], "attention": []}  # 2 heads beside 4 can't be compared
    assert judged[-1]["hidden"] < 0.7 * judged[0]["hidden"]
    assert judged[-1]["output"] < 0.7 * judged[0]["output"]


def test_the_folder_holds_the_student_alone_and_tells_who_taught_it(tmp_path: Path) -> None:
    options = _options(tmp_path, tiny_classifier(), Classifier(**_SMALL))
    result = distill(options, _ignore)
    assert sorted(path.name for path in result.folder.iterdir()) == [
        "model.safetensors",
        "tokenizer.json",
        "training.json",
    ]
    record = json.loads((result.folder / "training.json").read_text(encoding="utf-8"))
    assert record["teacher"] == {"source": "tiny", "task": "text-classification", "weights": "random seed 0"}
    assert (record["split"], record["loop"]["seed"], record["goal"]["temperature"]) == ("seeded 0.1", 0, 2.0)
    assert record["examples"] == {"held_out": 4, "train": 36}
    assert {"loss", "output", "hidden", "agreement"} <= record["metrics"].keys()
    loaded = load("classifier", weights=str(result.folder / "model.safetensors"))
    assert loaded.text is not None and loaded.text.labels == ("negative", "positive")
    assert (loaded.config["d_model"], loaded.config["vocab_size"]) == (8, 128)


def _swapped(model: EagerModel, names: tuple[str, ...]) -> EagerModel:
    """The same classifier with its two labels the other way round, and called so."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        for tensor in (module.get_parameter("head.weight"), module.get_parameter("head.bias")):
            tensor.copy_(tensor.flip(0))
    assert model.text is not None
    return dataclasses.replace(model, module=module, text=dataclasses.replace(model.text, labels=names))


def test_labels_are_matched_by_their_names_whatever_their_order_and_case(tmp_path: Path) -> None:
    model = tiny_classifier()
    options = _options(tmp_path, model, _swapped(model, ("POSITIVE", "Negative")))
    options = dataclasses.replace(
        options, data=(_labelled(tmp_path),), loop=dataclasses.replace(_LOOP, rate_factor=1e-9)
    )
    result = distill(options, _ignore)
    # The student is the teacher already; by position its labels would be far apart.
    assert result.metrics["output"] <= 100 * _EPS
    assert result.metrics["agreement"] == 1


def test_labelled_text_adds_the_labelled_loss_and_plain_text_does_not(tmp_path: Path) -> None:
    model = tiny_classifier()
    student = _swapped(model, ("positive", "negative"))
    options = dataclasses.replace(
        _options(tmp_path, model, student),
        loop=dataclasses.replace(_LOOP, steps=1, rate_factor=1e-9),
        goal=Goal(hard=0.3),
    )
    plain = distill(options, _ignore).metrics
    both = dataclasses.replace(options, data=(*options.data, _labelled(tmp_path)), output=tmp_path / "both")
    metrics = distill(both, _ignore).metrics
    assert not {"labels", "accuracy"} & plain.keys()
    layers = metrics["hidden"] + metrics["attention"]
    # The held-out rows come from the labelled file; sums of at most four terms near 1.
    expected = 0.7 * metrics["output"] + 0.3 * metrics["labels"] + layers
    assert metrics["loss"] == pytest.approx(expected, abs=10 * _EPS)
    assert 0 <= metrics["accuracy"] <= 1


def test_with_another_tokenizer_only_whole_texts_are_matched_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(train_tokenizer(_texts(), 80).to_str(), encoding="utf-8")
    options = dataclasses.replace(
        _options(tmp_path, tiny_classifier(), Classifier(**_SMALL)), tokenizer=tokenizer, loop=_LOOP
    )
    with caplog.at_level(logging.WARNING, "tx_export"):
        result = distill(options, _ignore)
    assert result.linked == {"hidden": [], "attention": []}
    assert "different tokenizers: only what they say about whole texts is matched" in caplog.text
    assert set(result.metrics) == {"loss", "output", "agreement"}


def _weights(result: DistillResult) -> dict[str, Tensor]:
    return safetensors.torch.load_file(result.folder / "model.safetensors")


@pytest.mark.parametrize("goal", [Goal(), Goal(hidden=0.0, attention=0.0)], ids=["live", "remembered"])
def test_a_run_that_was_stopped_is_continued_to_the_same_weights(tmp_path: Path, goal: Goal) -> None:
    options = dataclasses.replace(
        _options(tmp_path, tiny_classifier(), Classifier(**(_SMALL | {"dropout": 0.2}))),
        goal=goal,
        loop=dataclasses.replace(_LOOP, word_dropout=0.1, checkpoint_every=5),
    )
    whole = _weights(distill(options, _ignore))

    def killed(record: TrainRecord) -> None:
        if record.step == 7:
            raise _KilledError

    stopped = dataclasses.replace(options, output=tmp_path / "stopped")
    with pytest.raises(_KilledError):
        distill(stopped, killed)
    steps: list[int] = []
    continued = _weights(distill(stopped, lambda record: steps.append(record.step)))
    assert steps[0] == 6
    assert whole.keys() == continued.keys()
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


@pytest.mark.parametrize("width", [16, 8])
def test_an_embedder_teaches_an_embedder_of_its_width_or_another(tmp_path: Path, width: int) -> None:
    spec, judged = Embedder(**(_SMALL | {"d_model": width})), []
    options = dataclasses.replace(
        _options(tmp_path, tiny_embedder(), spec),
        loop=dataclasses.replace(_LOOP, steps=60, rate_factor=0.5, evaluate_every=20),
        goal=Goal(hidden=0.0, attention=0.0),
    )
    result = distill(options, lambda record: judged.append(record.held_out) if record.held_out else None)
    assert judged[-1]["output"] < 0.8 * judged[0]["output"]
    assert result.metrics["agreement"] > 0.5


class _Scores(nn.Module):
    """A user's module: scores of three labels from the mean of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(128, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weights = attention_mask[:, :, None].float()
        mean: Tensor = (self.words(input_ids) * weights).sum(dim=1) / weights.sum(dim=1)
        return mean


def _users_module() -> EagerModel:
    inputs = ("input_ids:int64[batch,tokens<=32]{0..127}", "attention_mask:int64[batch,tokens<=32]")
    torch.manual_seed(0)
    return eager_model(_Scores(), inputs, ("scores:float32[batch,3]",))


def test_a_users_module_teaches_with_a_tokenizer_that_is_given(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    text = tiny_classifier().text
    assert text is not None
    tokenizer.write_text(text.tokenizer, encoding="utf-8")
    spec = Classifier(**_SMALL, labels=("bad", "plain", "good"))
    result = distill(dataclasses.replace(_options(tmp_path, _users_module(), spec), tokenizer=tokenizer), _ignore)
    assert load("classifier", weights=str(result.folder / "model.safetensors")).config["labels"] == [*spec.labels]


def _pruned(model: EagerModel) -> nn.Module:
    """Without what the first layer adds: half of the encoder is gone, the shapes are the same."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "layers.0.feed_forward.down" in name:
                weight.zero_()
    return module


def test_recovery_brings_a_pruned_copy_nearer_and_leaves_the_given_modules_alone() -> None:
    teacher = tiny_classifier()
    pruned = _pruned(teacher)
    before = [copy.deepcopy(module.state_dict()) for module in (teacher.module, pruned)]
    judged: list[float] = []
    recovered = recover(
        teacher, pruned, _texts(), 40, 0, lambda record: judged.append((record.held_out or {"loss": 0.0})["loss"])
    )
    ids = torch.tensor([[2, 9, 8, 30, 41, 7, 3]])
    with torch.no_grad():
        whole, cut, learnt = (module(ids, torch.ones_like(ids)) for module in (teacher.module, pruned, recovered))
    assert (learnt - whole).norm() < 0.7 * (cut - whole).norm()
    assert not recovered.training
    for module, state in zip((teacher.module, pruned), before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    again = recover(teacher, pruned, _texts(), 40, 0, _ignore)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in recovered.state_dict().items())


def test_recovery_that_makes_nothing_better_keeps_the_start_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_distillation, "_PEAK", 10.0)
    teacher = tiny_classifier()
    with caplog.at_level(logging.WARNING, "tx_export"):
        kept = recover(teacher, teacher.module, _texts(), 4, 0, _ignore)
    assert "no step of 4 was better than none" in caplog.text
    assert all(torch.equal(value, teacher.module.state_dict()[name]) for name, value in kept.state_dict().items())


def test_recovery_says_what_it_lacks() -> None:
    model = tiny_classifier()
    with pytest.raises(LoadError, match=r"1 line\(s\); it takes at least two"):
        recover(model, model.module, ["one line", " "], 1, 0, _ignore)
    with pytest.raises(LoadError, match="there is no tokenizer"):
        recover(dataclasses.replace(model, text=None), model.module, _texts(), 1, 0, _ignore)


def test_a_file_without_tabs_is_text_and_one_with_tabs_is_labelled(tmp_path: Path) -> None:
    assert {example.label for example in read_texts(_plain(tmp_path))} == {""}
    assert {example.label for example in read_texts(_labelled(tmp_path))} == {"negative", "positive"}
    mixed, empty = tmp_path / "mixed.tsv", tmp_path / "empty.txt"
    mixed.write_text("good\tone\ntwo\n", encoding="utf-8")
    empty.write_text("\n\n", encoding="utf-8")
    with pytest.raises(LoadError, match=r"line 2: 1 column"):
        read_texts(mixed)
    with pytest.raises(LoadError, match="no text"):
        read_texts(empty)


def test_models_that_do_not_go_together_are_refused_in_a_line(tmp_path: Path) -> None:
    def refused(message: str, teacher: EagerModel, student: BuiltInSpec | EagerModel, **changes: Any) -> None:
        with pytest.raises(LoadError, match=message):
            distill(dataclasses.replace(_options(tmp_path, teacher, student), **changes), _ignore)

    classifier, embedder = tiny_classifier(), tiny_embedder()
    assert classifier.text is not None
    named = dataclasses.replace(classifier, text=dataclasses.replace(classifier.text, labels=("bad", "good")))
    refused("must give logits for labels", embedder, Classifier(**_SMALL))
    refused("must give an embedding of a text", classifier, Embedder(**_SMALL))
    refused("label 'bad', which is not one of the teacher's: negative, positive", classifier, named)
    refused("the data has the label 'negative'", named, Classifier(**_SMALL), data=(_labelled(tmp_path),))
    fewer = dataclasses.replace(classifier, text=dataclasses.replace(classifier.text, labels=("negative",)))
    refused("tiny negative; they must be the same", classifier, fewer)
    scored = dataclasses.replace(classifier, text=dataclasses.replace(classifier.text, scores="sigmoid"))
    refused("scores its labels by sigmoid, tiny by softmax", scored, classifier)
    refused("there is no tokenizer", dataclasses.replace(classifier, text=None), classifier)
    refused("brings no tokenizer; give it one with --tokenizer", _users_module(), Classifier(**_SMALL))
    refused("tiny brings its own", classifier, classifier, dropout=0.1)
    few = tmp_path / "few.txt"
    few.write_text("one text\n", encoding="utf-8")
    refused("too few to hold some out", classifier, classifier, data=(few,))
    with pytest.raises(TxExportError, match="temperature must be above 0"):
        Goal(temperature=0)


def test_a_built_in_teacher_has_the_weights_that_are_named(tmp_path: Path) -> None:
    given = distill(_options(tmp_path, tiny_classifier(), Classifier(**_SMALL)), _ignore).folder / "model.safetensors"
    arguments = ["distill", "classifier", "classifier", "--teacher-weights", str(given), "--set", "d_model=8"]
    places = ["--set", "num_layers=1", "--steps", "2", "--data", str(_plain(tmp_path)), "-o", str(tmp_path / "next")]
    done = CliRunner().invoke(program, [*arguments, *places], catch_exceptions=False)
    assert done.exit_code == 0
    record = json.loads((tmp_path / "next" / "training.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(given.read_bytes()).hexdigest()
    assert record["teacher"] == {
        "source": "classifier",
        "task": "text-classification",
        "weights": f"checkpoint {digest}",
    }


def test_the_command_trains_a_student_of_a_checkpoint(tmp_path: Path) -> None:
    folder = tiny_bert_folder(tmp_path / "bert", "BertForSequenceClassification")
    arguments = ["distill", str(folder), "classifier", "--set", "d_model=16", "--set", "num_layers=2", "--steps", "4"]
    places = ["--data", str(_plain(tmp_path)), "--evaluate-every", "2", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(program, [*arguments, *places], catch_exceptions=False)
    assert done.exit_code == 0
    assert "held-out agreement" in done.stdout
    assert load("classifier", weights=str(tmp_path / "out" / "model.safetensors")).config["labels"] == [
        "bad",
        "plain",
        "good",
    ]
