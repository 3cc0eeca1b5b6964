"""How a command runs and ends: exit codes, `error:` and `notice:` lines, progress. All of it goes to stderr."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import takewhile
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tx_export.training import TrainRecord

__all__ = ["run", "stepping", "working"]


_INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def run(program: click.Command, arguments: Sequence[str]) -> int:
    """Run the command line; 0 done, 1 failed, 2 usage, 3 outside the budget, 130 interrupted."""
    debug = "--debug" in takewhile(lambda argument: argument != "--", arguments)
    _hold_logs(debug)
    try:
        return _invoke(program, arguments)
    except BrokenPipeError:
        # Nobody reads any more; without this the interpreter's last flush would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, click.Abort):
        print("error: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = _explain(error)
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        return code


def _invoke(program: click.Command, arguments: Sequence[str]) -> int:
    code = 0
    try:
        with program.make_context("tx-export", list(arguments)) as context:
            program.invoke(context)
    except click.exceptions.Exit as done:
        code = done.exit_code
    sys.stdout.flush()
    return code


def _explain(error: Exception) -> tuple[str, int]:
    from tx_export.errors import TxExportError

    if isinstance(error, TxExportError):
        return str(error), error.exit_code
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx is not None else "tx-export"
        return f"{error.format_message().rstrip('.')}; see {command} --help", error.exit_code
    if isinstance(error, click.ClickException):
        return error.format_message(), error.exit_code
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror, 1
    return f"unexpected {type(error).__name__}: {error}; run with --debug for the traceback", 1


def _hold_logs(debug: bool) -> None:
    """Our warnings become notices; what others log and warn about shows with --debug only."""
    ours = logging.getLogger("tx_export")
    ours.handlers = [_Notices(logging.DEBUG if debug else logging.WARNING)]
    ours.setLevel(logging.DEBUG if debug else logging.WARNING)
    ours.propagate = False
    if debug:
        logging.basicConfig(level=logging.INFO)
        return
    logging.getLogger().addHandler(logging.NullHandler())
    warnings.simplefilter("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the processes that benchmarks start
    os.environ.setdefault("TORCH_LOGS", "-all")  # torch's loggers have handlers of their own; errors only


class _Notices(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        word = "notice" if record.levelno >= logging.WARNING else "debug"
        print(f"{word}: {record.getMessage()}", file=sys.stderr, flush=True)


@contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """Gives a function that shows a line of progress: beside a spinner on a terminal, plain elsewhere.

    What foreign code prints meanwhile goes to stderr.
    """
    with redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield lambda line: print(line, file=sys.stderr, flush=True)
            return
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status("") as status:
            yield lambda line: status.update(Text(line))


@contextmanager
def stepping() -> Iterator[Callable[[TrainRecord], None]]:
    """Gives a function that shows a step of training: as a bar on a terminal, elsewhere a line for each evaluation."""
    if not sys.stderr.isatty():
        yield lambda record: None if record.held_out is None else print(_judged(record), file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("training")

        def show(record: TrainRecord) -> None:
            bar.update(task, completed=record.step, total=record.steps, description=f"loss {record.loss:.3f}")
            if record.held_out is not None:
                bar.console.print(_judged(record), highlight=False)

        yield show


def _judged(record: TrainRecord) -> str:
    held_out = ", ".join(f"{name} {value:.4f}" for name, value in sorted((record.held_out or {}).items()))
    return f"epoch {record.epoch + 1}, step {record.step} of at most {record.steps}: held-out {held_out}"
