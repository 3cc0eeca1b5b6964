"""The commands that train: from labels, or from a teacher."""

from __future__ import annotations

from pathlib import Path

import click

from tx_export import _arguments, _console, _tables

__all__ = ["train"]


@click.command()
@click.argument("model")
@_arguments.size
@click.option("--data", required=True, type=_arguments.FILE, help="Lines of label<TAB>text[<TAB>confidence].")
@click.option("--held-out", type=_arguments.FILE, help="Decides when to stop; default: a seeded tenth of the data.")
@click.option("--tokenizer", type=_arguments.FILE, help="A tokenizer.json; default: one is trained on the data.")
@click.option("--weights", "initial", type=_arguments.FILE, help="Weights (safetensors) to start from.")
@click.option(
    "-o", "--output", metavar="DIR", type=_arguments.NEW_FOLDER, help="Default: artifacts/MODEL-SIZE-weights."
)
@click.option("--dropout", type=float, help="While training; default: the model's.")
@_arguments.loop
@_arguments.debug
@click.pass_context
def train(
    context: click.Context, model: str, size: str, data: Path, held_out: Path | None, tokenizer: Path | None,
    initial: Path | None, output: Path | None, dropout: float | None,
) -> None:  # fmt: skip
    """Train MODEL on labelled text; a run that was stopped is continued by the same command."""
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
        held_out=held_out, tokenizer=tokenizer, initial=initial, dropout=dropout,
        loop=training.LoopOptions(**loop),
    )  # fmt: skip
    with _console.stepping() as progress:
        result = training.train(options, progress)
    _tables.print_training(result)
