"""Recovery: a pruned module learns from the unpruned one, on text, before it is exported.

Its weights stand nowhere but in the graph, so an artifact is held to two things that its manifest records: it computes
what the recovered module does (its samples), and it is no farther from the unpruned one than when it was made.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tx_export import runtime
from tx_export._distillation import recover
from tx_export._judged_passes import Progress
from tx_export._training_loop import TrainRecord
from tx_export.errors import ArtifactError, LoadError, PassError, PluginError
from tx_export.metrics import Budget
from tx_export.passes import Context, ModulePass, Pipeline
from tx_export.spec import EagerModel
from tx_export.verify import Judge, Runner, Split, Step, eager_runner, split_lines, text_feeds
from tx_export.verify import compare as compare_steps

__all__ = ["STEPS", "Recovery", "compare_recovered", "measured", "read_recovery", "recovered"]

STEPS = 1000  # unless a number is asked for
_MARGIN_DB = 3.0  # another machine may round otherwise; a fault costs far more
_EXACT_DB = 90.0  # for outputs that do not differ at all: what fidelity asks of float32
_LEAST = 5  # lines, of which one is held out


@dataclass(frozen=True)
class Recovery:
    """The lines to learn from, every fifth aside, which shows what it brought; and for how many steps."""

    lines: Split
    steps: int


def read_recovery(file: Path | None, steps: int | None, pipeline: Pipeline) -> Recovery | None:
    """What `--recover FILE --steps N` asks for; PluginError where nothing is pruned, LoadError for other text."""
    if file is None:
        if steps is not None:
            raise PluginError("--steps is for --recover FILE")
        return None
    if not any(isinstance(item, ModulePass) and item.subject.startswith("pruned") for item in pipeline.passes):
        raise PluginError("--recover: no pass prunes, so there is nothing to recover; give --prune-heads, or --passes")
    if steps is not None and steps < 1:
        raise PluginError(f"--steps is {steps}; it must be at least 1")
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"--recover {file}: can't be read: {error}") from error
    if len(lines) < _LEAST:
        raise LoadError(f"--recover {file}: {len(lines)} lines; it takes at least {_LEAST}, as every fifth only judges")
    return Recovery(split_lines(lines), steps or STEPS)


def recovered(
    whole: EagerModel, pruned: EagerModel, asked: Recovery | None, context: Context, progress: Progress
) -> tuple[EagerModel, dict[str, Any]]:
    """The pruned model with better weights, of the same shapes and zeros, and what the manifest says of it.

    As it was where nothing is asked for. PassError where it is no nearer to the whole model than before, on the lines
    held out. The same lines and seed give the same weights on the same machine with the same number of threads.
    """
    if asked is None:
        return pruned, {}
    if whole.text is None:
        raise LoadError(f"--recover: {whole.source} has no tokenizer, so it can't learn from text")
    assert context.drift is not None
    feeds = text_feeds(whole, asked.lines.judging)
    before = context.drift(eager_runner(pruned), feeds)
    learnt = recover(whole, _Sparse(pruned.module), asked.lines.choosing, asked.steps, context.seed, _told(progress))
    assert isinstance(learnt, _Sparse)
    model = dataclasses.replace(pruned, module=learnt.put_back())
    after = context.drift(eager_runner(model), feeds)
    gain = f"{before['sqnr_db']:.2f} dB before, {after['sqnr_db']:.2f} dB behind it, on lines held out"
    progress(f"recover: {gain}")
    if not after["sqnr_db"] > before["sqnr_db"]:
        raise PassError(
            f"--recover: {asked.steps} steps brought the pruned model no nearer to the whole one ({gain}); "
            "give more steps or more text, or leave it out"
        )
    text = {"sha256": _hash_of(asked.lines), "lines": sum(map(len, asked.lines)), "held_out": len(asked.lines.judging)}
    record = {"text": text, "steps": asked.steps, "seed": context.seed, "before": before, "after": after}
    return model, record | {"weights": _hash_of_weights(model.module)}


def _told(progress: Progress) -> Callable[[TrainRecord], None]:
    def tell(record: TrainRecord) -> None:
        if record.held_out is not None:
            progress(f"recover: step {record.step} of {record.steps}, held-out loss {record.held_out['loss']:.4g}")

    return tell


class _Sparse(nn.Module):
    """A module in which weights of products that were zero are zero again before each call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.zeros = {name: weight == 0 for name, weight in module.named_parameters() if weight.ndim == 2}

    @torch.no_grad()
    def put_back(self) -> nn.Module:
        for name, places in self.zeros.items():
            self.module.get_parameter(name).masked_fill_(places, 0)
        return self.module

    def forward(self, *inputs: Tensor) -> Any:
        return self.put_back()(*inputs)


def _hash_of(lines: Split) -> str:
    return hashlib.sha256("\n".join((*lines.choosing, *lines.judging)).encode()).hexdigest()


def _hash_of_weights(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(module.state_dict().items()):
        digest.update(name.encode() + weight.contiguous().numpy().tobytes())
    return digest.hexdigest()


def measured(record: Mapping[str, Any], whole: EagerModel, runner: Runner) -> dict[str, Any]:
    """`recovered` of the manifest: the record with `artifact_sqnr_db`, from the whole model on what `compare` reads."""
    if not record:
        return {}
    found = Judge(whole).check(Step("recovered", runner, Budget()))["outputs"].values()
    values = [output["sqnr_db"] for output in found if output["sqnr_db"] is not None]  # None: no difference at all
    return {"recovered": {**record, "artifact_sqnr_db": min(values, default=_EXACT_DB)}}


def compare_recovered(whole: EagerModel, opened: runtime.Model, record: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of `compare` for an artifact whose weights were recovered, by what its manifest records."""
    try:
        budget = Budget(sqnr_db=float(record["artifact_sqnr_db"]) - _MARGIN_DB)
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError("manifest.json: recovered has no number artifact_sqnr_db") from error
    found = compare_steps(whole, [Step("artifact", opened.run_arrays, budget)])
    reason = found.failure
    if reason is None and not runtime.self_test(opened)["agrees"]:
        reason = "self-test: the artifact does not compute what its samples say of the recovered module"
    report = found.to_json()
    return report if reason is None else report | {"verdict": "fail", "reason": reason}
