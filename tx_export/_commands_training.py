"""The commands that train: from labels, or from a teacher."""

from __future__ import annotations

from pathlib import Path

import click

from tx_export import _arguments, _console, _tables

__all__ = ["distill", "train"]

_DATA = "Lines of label<TAB>text[<TAB>confidence], for seq2seq source<TAB>target, for lm running text."


@click.command()
@click.argument("model")
@_arguments.size
@click.option("--data", required=True, type=_arguments.FILE, help=_DATA)
@click.option("--held-out", type=_arguments.FILE, help="Decides when to stop; default: a seeded tenth of the data.")
@click.option("--tokenizer", type=_arguments.FILE, help="A tokenizer.json; default: one is trained on the data.")
@click.option("--weights", "initial", type=_arguments.FILE, help="Weights (safetensors) to start from.")
@click.option(
    "-o", "--output", metavar="DIR", type=_arguments.NEW_FOLDER, help="Default: artifacts/MODEL-SIZE-weights."
)
@click.option("--dropout", type=float, help="While training; default: the model's.")
@click.option("--qat", flag_value="dynamic_int8", help="Train for 8 bits: values are rounded as dynamic_int8 does.")
@_arguments.loop
@_arguments.debug
@click.pass_context
def train(
    context: click.Context, model: str, size: str, data: Path, held_out: Path | None, tokenizer: Path | None,
    initial: Path | None, output: Path | None, dropout: float | None, qat: str | None,
) -> None:  # fmt: skip
    """Train MODEL on text; a run that was stopped is continued by the same command.

    A classifier learns labels, seq2seq targets of sources, lm how text goes on.
    """
    from tx_export import plugins, training
    from tx_export.spec import BuiltInSpec

    family = plugins.find("model", model)
    if not issubclass(family, BuiltInSpec):
        raise click.BadParameter(
            f"{model} is not a built-in model; it can't be trained from scratch", param_hint="MODEL"
        )
    loop = {"batch_size": family.training_batch[size]} | context.meta.get(_arguments.LOOP, {})
    options = training.TrainOptions(
        spec=family(**family.sizes[size]), data=data, output=output or Path("artifacts", f"{model}-{size}-weights"),
        held_out=held_out, tokenizer=tokenizer, initial=initial, dropout=dropout, qat=qat,
        loop=training.LoopOptions(**loop),
    )  # fmt: skip
    with _console.stepping() as progress:
        result = training.train(options, progress)
    _tables.print_training(result)


@click.command()
@click.argument("teacher")
@click.argument("student")
@_arguments.size
@_arguments.settings
@click.option(
    "--data", required=True, multiple=True, type=_arguments.FILE,
    help="Lines of label<TAB>text[<TAB>confidence], or of text alone; repeat.",
)  # fmt: skip
@click.option("--held-out", type=_arguments.FILE, help="Decides when to stop; default: a seeded tenth of the data.")
@click.option("--tokenizer", type=_arguments.FILE, help="A tokenizer.json for a new student; default: the teacher's.")
@click.option(
    "--weights", "initial", type=_arguments.FILE, help="Weights (safetensors) for a new student to start from."
)
@click.option("--teacher-weights", metavar="FILE", help="Of the teacher (safetensors); default: its own.")
@click.option("--task", metavar="NAME", help="Of the teacher; default: what its checkpoint says.")
@click.option("--temperature", type=click.FloatRange(0, min_open=True), default=2.0, show_default=True)
@click.option("--hard", type=click.FloatRange(0, 1), default=0.1, show_default=True, help="Share of the labels' loss.")
@click.option("--hidden", type=click.FloatRange(0), default=1.0, show_default=True, help="Weight of hidden states.")
@click.option("--attention", type=click.FloatRange(0), default=1.0, show_default=True, help="Weight of attention.")
@click.option("-o", "--output", metavar="DIR", type=_arguments.NEW_FOLDER, help="Default: artifacts/STUDENT-distilled.")
@click.option("--dropout", type=float, help="Of a new student while it trains; default: its own.")
@_arguments.loop
@_arguments.debug
@click.pass_context
def distill(
    context: click.Context, teacher: str, student: str, size: str, settings: dict[str, str], data: tuple[Path, ...],
    held_out: Path | None, tokenizer: Path | None, initial: Path | None, teacher_weights: str | None,
    task: str | None, temperature: float, hard: float, hidden: float, attention: float, output: Path | None,
    dropout: float | None,
) -> None:  # fmt: skip
    """Train STUDENT, a built-in model or another source, to compute what TEACHER, any source, does.

    Outputs are matched, and layers where both read text alike. A run that was stopped is continued by the same command.
    """
    from tx_export import _distillation_run, _distillation_student, training
    from tx_export._distillation_course import Goal
    from tx_export.load import load

    options = _distillation_run.DistillOptions(
        teacher=load(teacher, weights=teacher_weights, task=task),
        student=_distillation_student.student_of(student, size, settings), data=data,
        output=output or Path("artifacts", f"{Path(student).name}-distilled"), held_out=held_out, tokenizer=tokenizer,
        initial=initial, dropout=dropout, goal=Goal(temperature, hard, hidden, attention),
        loop=training.LoopOptions(**context.meta.get(_arguments.LOOP, {})),
    )  # fmt: skip
    with _console.stepping() as progress:
        result = _distillation_run.distill(options, progress)
    _tables.print_training(result)
