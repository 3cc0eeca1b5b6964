"""prune_heads: the pruned module is the whole one with those heads' outputs zeroed, in every family and encoder."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from tx_export.errors import PassError, PluginError
from tx_export.load import load
from tx_export.models.albert import Albert
from tx_export.models.classifier import Classifier
from tx_export.models.modernbert import ModernBert
from tx_export.models.mpnet import Mpnet
from tx_export.models.parts.attention import Attention
from tx_export.models.roberta import Roberta
from tx_export.passes import Context, Coverage
from tx_export.quantize import _heads, _units
from tx_export.quantize.prune_heads import PruneHeads
from tx_export.spec import EagerModel, ModelSpec
from tx_export.testing import eager_model, tiny_bert_folder, tiny_classifier, tiny_embedder
from tx_export.verify import default_lines, grid, text_feeds

Heads = Mapping[int, Sequence[int]]

_BOUND = 1e-5  # the order of sums of a few dozen float32 products changes, nothing else


def context(model: EagerModel, lines: int = 16) -> Context:
    feeds = text_feeds(model, default_lines()[:lines]) if model.text is not None else ()
    return Context(model.module, feeds, open=refused, probes=[case.feeds for case in grid(model, 17)][-3:])


def refused(model: Any) -> Any:
    raise AssertionError("no session is needed to prune")


def pruned(model: EagerModel, heads: Heads) -> tuple[nn.Module, Coverage]:
    text = ";".join(f"{layer}:{','.join(map(str, each))}" for layer, each in heads.items() if each)
    return PruneHeads(heads=text, context=context(model)).apply(model.module)


def masked(module: nn.Module, outputs: Sequence[str], heads: Heads, count: int) -> nn.Module:
    """A copy in which what enters the named products is zeroed at the channels of the heads, before each run."""
    copied = copy.deepcopy(module)
    for layer, each in heads.items():

        def zero(_module: nn.Module, given: tuple[Tensor, ...], each: Sequence[int] = each) -> Tensor:
            context = given[0].clone()
            width = context.shape[-1] // count
            for head in each:
                context[..., head * width : (head + 1) * width] = 0
            return context

        copied.get_submodule(outputs[layer]).register_forward_pre_hook(zero)
    return copied


def outputs_of(module: nn.Module) -> list[str]:
    return [f"{name}.output" for name, layer in module.named_modules() if isinstance(layer, Attention)]


def inputs(model: EagerModel) -> list[Tensor]:
    """Random ids and a ragged mask, and whatever else the model takes."""
    case = next(case for case in grid(model, 17) if case.shape == (5, 17) and case.mask == "ragged")
    return [torch.from_numpy(case.feeds[spec.name]) for spec in model.inputs]


@torch.no_grad()
def difference(one: nn.Module, other: nn.Module, given: Sequence[Tensor]) -> float:
    return float((one(*given) - other(*given)).abs().max())


def random_heads(seed: int, layers: int = 2, count: int = 4) -> dict[int, list[int]]:
    random = np.random.default_rng(seed)
    chosen = {layer: np.flatnonzero(random.random(count) < 0.5).tolist() for layer in range(layers)}
    return chosen if any(chosen.values()) else {0: [seed % count]}


@pytest.fixture(scope="module")
def classifier() -> EagerModel:
    return tiny_classifier()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[EagerModel, Any]:
    """Ours, and transformers' own."""
    folder = tiny_bert_folder(tmp_path_factory.mktemp("bert") / "tiny", "BertForSequenceClassification")
    theirs = transformers.BertForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    return load(str(folder)), theirs.eval()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("seed", range(12))
def test_random_heads_pruned_from_a_classifier_are_as_if_their_outputs_were_zero(
    seed: int, classifier: EagerModel
) -> None:
    heads, given = random_heads(seed), inputs(classifier)
    module, coverage = pruned(classifier, heads)
    reference = masked(classifier.module, outputs_of(classifier.module), heads, 4)
    assert difference(module, reference, given) <= _BOUND < 1e-3 < difference(module, classifier.module, given)
    assert coverage.done == sum(map(len, heads.values()))


@pytest.mark.parametrize("seed", range(12))
def test_random_heads_pruned_from_a_bert_give_what_transformers_gives_with_them_masked(
    seed: int, bert: tuple[EagerModel, Any]
) -> None:
    model, theirs = bert
    heads, given = random_heads(seed), inputs(model)
    module, _ = pruned(model, heads)
    places = [f"bert.encoder.layer.{layer}.attention.output.dense" for layer in range(2)]
    reference = masked(theirs, places, heads, 4)
    with torch.no_grad():
        named = dict(zip([spec.name for spec in model.inputs], given, strict=True))
        assert (module(*given) - reference(**named).logits).abs().max() <= _BOUND


_SIZES: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 32}
_SMALL: dict[str, Any] = {"vocab_size": 99, "d_model": 24, "num_layers": 2, "num_heads": 4, "d_ff": 32}


def _encoder(positions: str) -> Callable[[], ModelSpec]:
    return lambda: Classifier(**_SMALL, positions=positions, max_length=40)  # type: ignore[arg-type]


_FAMILIES: dict[str, Callable[[], ModelSpec]] = {
    "modernbert": lambda: ModernBert(
        **_SIZES, vocab_size=99, max_position_embeddings=40, local_attention=4, pad_token_id=0,
        layer_types=("full_attention", "sliding_attention", "sliding_attention"),
    ),
    "mpnet": lambda: Mpnet(**_SIZES, vocab_size=99, max_position_embeddings=40),
    "roberta": lambda: Roberta(**_SIZES, vocab_size=99, max_position_embeddings=40),
    "rotary": _encoder("rotary"),
    "alibi": _encoder("alibi"),
    "relative": _encoder("relative"),
}  # fmt: skip


def built(spec: ModelSpec, name: str) -> EagerModel:
    """With weights so large that attention prefers some tokens and biases matter."""
    torch.manual_seed(0)
    module = spec.build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    pad_id = 1 if name in ("mpnet", "roberta") else None
    return eager_model(module, spec.inputs(), spec.outputs(), family=name, padding="right", pad_id=pad_id)


@pytest.mark.parametrize("name", _FAMILIES)
def test_biases_rotations_and_packed_weights_follow_their_heads(name: str) -> None:
    model = built(_FAMILIES[name](), name)
    heads, given = {0: [1], 1: [0, 2, 3]}, inputs(model)
    module, _ = pruned(model, heads)
    reference = masked(model.module, outputs_of(model.module), heads, 4)
    # Hidden states here reach 10, so that the order of sums is worth 3e-6 of that.
    assert difference(module, reference, given) <= 3e-5 < 1e-2 < difference(module, model.module, given)
    again, _ = pruned(dataclasses.replace(model, module=module), {0: [0, 2]})  # of what was left
    twice = masked(model.module, outputs_of(model.module), {0: [0, 1, 3], 1: [0, 2, 3]}, 4)
    assert difference(again, twice, given) <= 3e-5


def test_a_layer_that_runs_many_times_is_pruned_once() -> None:
    sizes = _SIZES | {"embedding_size": 16, "vocab_size": 99, "max_position_embeddings": 40}
    model = built(Albert(**sizes), "albert")
    module, coverage = pruned(model, {0: [0, 3]})
    reference = masked(model.module, outputs_of(model.module), {0: [0, 3]}, 4)
    assert (coverage.done, coverage.of, coverage.kept) == (2, 4, ((0, (1, 2)),))
    assert difference(module, reference, inputs(model)) <= 3e-5
    assert sum(isinstance(layer, Attention) for _, layer in module.named_modules(remove_duplicate=False)) == 3


def test_a_layer_without_heads_is_its_output_bias(classifier: EagerModel) -> None:
    module, coverage = pruned(classifier, {1: [0, 1, 2, 3]})
    reference = masked(classifier.module, outputs_of(classifier.module), {1: [0, 1, 2, 3]}, 4)
    assert difference(module, reference, inputs(classifier)) <= _BOUND
    assert coverage.kept == ((0, (0, 1, 2, 3)), (1, ()))
    assert sum(isinstance(layer, Attention) for layer in module.modules()) == 1


def test_the_given_module_stays_as_it_was(classifier: EagerModel) -> None:
    before = copy.deepcopy(classifier.module.state_dict())
    PruneHeads(ratio=0.5, context=context(classifier)).apply(classifier.module)
    after = classifier.module.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in classifier.module.parameters())


def test_heads_laid_out_otherwise_than_assumed_are_caught_by_the_proof(
    classifier: EagerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interleaved(kept: Sequence[int], width: int) -> Tensor:
        return torch.cat([torch.tensor(kept) + 4 * channel for channel in range(width)])

    monkeypatch.setattr(_heads, "repeated", interleaved)
    with pytest.raises(PassError, match=r"prune_heads: output 0 of the pruned module is .* away from that of the mod"):
        pruned(classifier, {0: [1]})


@pytest.mark.parametrize("make", [tiny_classifier, tiny_embedder])
@pytest.mark.parametrize("importance", ["gradient", "norm"])
def test_the_heads_that_matter_least_go_first(make: Callable[[], EagerModel], importance: str) -> None:
    model = make()  # the embedder's outputs have length 1, whatever its heads do
    with torch.no_grad():
        for layer, head in ((0, 2), (1, 0), (1, 3)):
            model.module.encoder.layers[layer].attention.output.weight[:, 4 * head : 4 * head + 4] *= 1e-3  # type: ignore[union-attr, index]
    _, coverage = PruneHeads(ratio=3 / 8, importance=importance, context=context(model)).apply(model.module)
    assert coverage.kept == ((0, (0, 1, 3)), (1, (1, 2)))


def test_padding_counts_for_no_head() -> None:
    hidden = torch.ones(2, 3, 4, requires_grad=True)
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    _units._signed(hidden, {"attention_mask": mask}, torch.Generator().manual_seed(0)).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None and torch.equal(hidden.grad.abs(), torch.from_numpy(mask)[..., None].expand(2, 3, 4))


def test_without_text_the_norm_of_the_weights_decides_and_is_told(
    classifier: EagerModel, caplog: pytest.LogCaptureFixture
) -> None:
    silent = dataclasses.replace(context(classifier), feeds=())
    _, found = PruneHeads(ratio=0.5, context=silent).apply(classifier.module)
    _, by_norm = PruneHeads(ratio=0.5, importance="norm", context=context(classifier)).apply(classifier.module)
    assert found.kept == by_norm.kept
    assert caplog.messages == ["prune_heads: without text to see importance by, the norm of the weights decides"]


def test_the_choice_repeats_itself_without_text(classifier: EagerModel) -> None:
    _, first = PruneHeads(ratio=0.5, context=context(classifier)).apply(classifier.module)
    again = PruneHeads.parse(str(*first.repeat).removeprefix("prune_heads{").removesuffix("}"))
    silent = dataclasses.replace(context(classifier), feeds=())
    _, second = dataclasses.replace(again, context=silent).apply(classifier.module)
    assert second.kept == first.kept and str(again).startswith("prune_heads{ratio=0.5, heads=0:")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "it takes a ratio, say ratio=0.25, or what to remove by hand"),
        ("ratio=1.5", "ratio is 1.5; it must be from 0 to 1"),
        ("ratio=0.5, importance=size", "importance is 'size'; known: gradient, norm"),
        ("heads=0-3", "heads: '0-3' is not LAYER:HEAD,..., say 0:1,3;2:0"),
        ("heads=0:1,1", "heads: '0:1,1' gives a layer or a head twice"),
        ("heads=0:1;0:2", "heads: '0:2' gives a layer or a head twice"),
    ],
)
def test_options_that_make_no_sense_say_what_does(options: str, message: str) -> None:
    with pytest.raises(PluginError, match=re.escape(message)):
        PruneHeads.parse(options)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({2: [0]}, "layer 2 is not there; the layers are 0 to 1"),
        ({1: [4]}, "layer 1 has no head 4; its heads are 0 to 3"),
    ],
)
def test_heads_that_are_not_there_are_named(heads: Heads, message: str, classifier: EagerModel) -> None:
    with pytest.raises(PassError, match=message):
        pruned(classifier, heads)


def test_attention_written_by_hand_is_refused() -> None:
    model = eager_model(nn.Sequential(nn.Linear(4, 4)), ["x:float32[batch,4]"], ["y:float32[batch,4]"])
    with pytest.raises(PassError, match=r"there is no attention of ours and no nn.MultiheadAttention; which weights"):
        pruned(model, {0: [0]})


def test_a_pass_that_has_nothing_to_prove_itself_on_is_refused(classifier: EagerModel) -> None:
    bare = Context(classifier.module, (), refused)
    with pytest.raises(PassError, match="no inputs to compare the pruned module with the masked one on"):
        PruneHeads(heads="0:1", context=bare).apply(classifier.module)


def test_saved_weights_of_a_pruned_module_fit_it_again(classifier: EagerModel, tmp_path: Path) -> None:
    module, _ = pruned(classifier, {0: [2]})
    torch.save(module.state_dict(), tmp_path / "pruned.pt")
    other, _ = pruned(tiny_classifier(seed=1), {0: [2]})
    other.load_state_dict(torch.load(tmp_path / "pruned.pt", weights_only=True))
    assert difference(module, other, inputs(classifier)) == 0
