"""Recovery: a pruned module learns from the unpruned one; what was pruned stays pruned, and compare tells the truth."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tx_export import _recovery, cli, plugins, runtime
from tx_export._judged_passes import context_of, run_module_passes
from tx_export._recovery import Recovery, read_recovery, recovered
from tx_export.artifact import seal
from tx_export.compiler import BuildOptions, build, compare
from tx_export.errors import ArtifactError, LoadError, PassError, PluginError
from tx_export.passes import Context, Pipeline
from tx_export.spec import EagerModel
from tx_export.testing import tiny_bert_folder, tiny_classifier
from tx_export.verify import default_lines, split_lines

_ASKED = Recovery(split_lines(default_lines()[:80]), steps=80)


def _pipeline(text: str) -> Pipeline:
    return Pipeline.parse(text, lambda name: plugins.find("pass", name))


def _ignore(message: str) -> None: ...


@dataclasses.dataclass(frozen=True)
class _Pruned:
    whole: EagerModel
    model: EagerModel
    context: Context


def _pruned(text: str) -> _Pruned:
    whole = tiny_classifier()
    context = context_of(whole, _ASKED.lines.choosing[:16], "cpu")
    model, _, _ = run_module_passes(whole, _pipeline(text), frozenset(), context, _ignore)
    return _Pruned(whole, model, context)


@pytest.fixture(scope="module")
def heads() -> _Pruned:
    return _pruned("prune_heads{ratio=0.75}")


def _recover(pruned: _Pruned) -> tuple[EagerModel, dict[str, Any]]:
    return recovered(pruned.whole, pruned.model, _ASKED, pruned.context, _ignore)


@pytest.fixture(scope="module")
def learnt(heads: _Pruned) -> tuple[EagerModel, dict[str, Any]]:
    return _recover(heads)


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in module.state_dict().items()}


def test_three_quarters_of_the_heads_less_are_recovered_by_6_db_on_lines_held_out(
    learnt: tuple[EagerModel, dict[str, Any]],
) -> None:
    # Reference: the unpruned module in eager. A named budget: half of the error's size; 80 steps reach 8 dB.
    record = learnt[1]
    assert record["after"]["sqnr_db"] >= record["before"]["sqnr_db"] + 6
    assert record["after"]["max_abs"] < record["before"]["max_abs"]
    assert record["text"] == {"sha256": record["text"]["sha256"], "lines": 80, "held_out": 16}
    assert (record["steps"], record["seed"]) == (80, 0)


def test_two_recoveries_are_identical(heads: _Pruned, learnt: tuple[EagerModel, dict[str, Any]]) -> None:
    model, record = _recover(heads)
    assert record == learnt[1]
    states = model.module.state_dict(), learnt[0].module.state_dict()
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())


def test_shapes_stay_those_of_the_pruned_module_which_stays_as_it_was(
    heads: _Pruned, learnt: tuple[EagerModel, dict[str, Any]]
) -> None:
    again = _pruned("prune_heads{ratio=0.75}").model.module.state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in heads.model.module.state_dict().items())
    assert _shapes(learnt[0].module) == _shapes(heads.model.module) != _shapes(heads.whole.module)
    assert not learnt[0].module.training


def test_weights_that_were_pruned_one_by_one_stay_zero() -> None:
    pruned = _pruned("prune_weights{ratio=0.5}")
    model, record = _recover(pruned)
    assert record["after"]["sqnr_db"] >= record["before"]["sqnr_db"] + 6
    before, after = pruned.model.module.state_dict(), model.module.state_dict()
    products = [name for name, weight in before.items() if weight.ndim == 2 and (weight == 0).any()]
    assert len(products) == 13  # six in each of two layers, and the head
    for name in products:
        assert torch.equal(after[name] == 0, before[name] == 0)
        assert not torch.equal(after[name], before[name])


def test_a_recovery_that_brings_nothing_is_an_error(heads: _Pruned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_recovery, "recover", lambda whole, student, *rest: copy.deepcopy(student))
    with pytest.raises(
        PassError, match=r"^--recover: 80 steps brought the pruned model no nearer .* \(\S+ dB before, .*\); give more"
    ):
        _recover(heads)


def test_what_can_not_be_recovered_is_refused(heads: _Pruned, tmp_path: Path) -> None:
    text, pruning = tmp_path / "text.txt", _pipeline("prune_ffn{ratio=0.5} dynamic_int8")
    with pytest.raises(LoadError, match=r"^--recover .*text\.txt: can't be read"):
        read_recovery(text, None, pruning)
    text.write_text("one\n\n \ntwo\n", encoding="utf-8")
    with pytest.raises(LoadError, match=r"^--recover .*text\.txt: 2 lines; it takes at least 5"):
        read_recovery(text, None, pruning)
    text.write_text("\n".join(default_lines()[:6]), encoding="utf-8")
    with pytest.raises(PluginError, match=r"^--recover: no pass prunes, so there is nothing to recover") as caught:
        read_recovery(text, None, _pipeline("fold_constants dynamic_int8"))
    assert caught.value.exit_code == 2
    with pytest.raises(PluginError, match=r"^--steps is 0; it must be at least 1$"):
        read_recovery(text, 0, pruning)
    with pytest.raises(PluginError, match=r"^--steps is for --recover FILE$"):
        read_recovery(None, 5, pruning)
    asked = read_recovery(text, None, pruning)
    assert asked is not None and (len(asked.lines.choosing), len(asked.lines.judging), asked.steps) == (5, 1, 1000)
    wordless = dataclasses.replace(heads.whole, text=None)
    with pytest.raises(LoadError, match=r"^--recover: tiny has no tokenizer, so it can't learn from text$"):
        recovered(wordless, heads.model, _ASKED, heads.context, _ignore)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with a quarter of its heads, recovered, in 8 bits."""
    folder = tmp_path_factory.mktemp("recovered")
    (folder / "text.txt").write_text("\n".join(default_lines()[:80]), encoding="utf-8")
    source = tiny_bert_folder(folder / "tiny", "BertForSequenceClassification")
    return build(
        BuildOptions(
            source=str(source), prune_heads="0.75", recover=folder / "text.txt", steps=80, output=folder / "artifact"
        )
    )


def _resealed(artifact: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    change(manifest)
    (artifact / "manifest.json").unlink()
    seal(artifact, {key: value for key, value in manifest.items() if key != "files"})


def test_an_artifact_tells_its_recovery_and_compare_passes_it(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = runtime.read_manifest(artifact)
    record = manifest["recovered"]
    assert record["after"]["sqnr_db"] > record["before"]["sqnr_db"] and record["steps"] == 80
    assert manifest["heads_per_layer"] == [1, 1]
    whole = manifest["verification"]["whole"]["outputs"]["logits"]["sqnr_db"]
    assert record["artifact_sqnr_db"] == pytest.approx(whole, abs=1e-9)  # no other text was given
    report = (artifact / "REPORT.md").read_text(encoding="utf-8")
    assert f"- recovered in 80 steps: from {record['before']['sqnr_db']:.4g} to " in report
    with pytest.raises(SystemExit):
        cli.main(["inspect", str(artifact)])
    assert "in 80 steps, from " in capsys.readouterr().out
    found = compare(artifact, str(artifact.parent / "tiny"))
    assert (found["verdict"], found.get("reason")) == ("pass", None)
    assert found["outputs"]["logits"]["sqnr_db"] == pytest.approx(record["artifact_sqnr_db"], abs=1e-9)


def test_compare_fails_an_artifact_that_is_farther_from_its_source_than_its_record(artifact: Path) -> None:
    def promise_more(manifest: dict[str, Any]) -> None:
        manifest["recovered"]["artifact_sqnr_db"] += 4  # beyond the 3 dB that another machine may cost

    original = (artifact / "manifest.json").read_bytes()
    try:
        _resealed(artifact, promise_more)
        found = compare(artifact, str(artifact.parent / "tiny"))
        assert found["verdict"] == "fail"
        assert "output 'logits': sqnr_db" in found["reason"]
        _resealed(artifact, lambda manifest: manifest["recovered"].pop("artifact_sqnr_db"))
        with pytest.raises(ArtifactError, match=r"^manifest.json: recovered has no number artifact_sqnr_db$"):
            compare(artifact, str(artifact.parent / "tiny"))
    finally:
        (artifact / "manifest.json").write_bytes(original)


def test_compare_fails_an_artifact_that_does_not_reproduce_its_recovered_module(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "self_test", lambda model: {"agrees": False})
    found = compare(artifact, str(artifact.parent / "tiny"))
    assert (found["verdict"], found["reason"].partition(":")[0]) == ("fail", "self-test")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recover", "text.txt"], "error: --recover: no pass prunes"),
        (["--prune-heads", "0.5", "--steps", "3"], "error: --steps is for --recover FILE"),
        (["--prune-heads", "0.5", "--recover", "text.txt", "--steps", "0"], "error: "),
    ],
)
def test_the_command_line_refuses_what_makes_no_sense(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("\n".join(default_lines()[:6]), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        cli.main(["build", *arguments, "-o", "out"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)
    assert not (tmp_path / "out").exists()
