"""Passes over modules and graphs, the context they are given, and the pipeline with its text form.

Text form: `prune_heads{ratio=0.25} dynamic_int8{per_channel=true}`; a pass's fields are its options.
"""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import onnx_ir as ir

from tx_export._option_text import format_value, parse_value
from tx_export.errors import PassError, PluginError, TxExportError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Context", "Coverage", "GraphPass", "Left", "ModulePass", "Outcome", "Pass", "Pipeline", "Stored"]

Feeds = Mapping[str, np.ndarray]
Runner = Callable[[Feeds], dict[str, np.ndarray]]

_ITEM = re.compile(r"\s*(?P<name>[\w./-]+(?::\w+)?)(?:\{(?P<options>[^{}]*)\})?(?=\s|$)")


@dataclass(frozen=True)
class Left:
    """Something that a pass left as it was, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Stored:
    """A weight that a pass stores as `form`, say int4, with its bytes before and after."""

    name: str
    before: int
    after: int
    form: str


@dataclass(frozen=True)
class Coverage:
    """`done` of `of` candidates were changed; the rest are `left`."""

    done: int
    of: int
    left: tuple[Left, ...] = ()
    kept: tuple[tuple[int, tuple[int, ...]], ...] = ()  # of pruned layers, by number: the heads that stay
    repeat: tuple[Pass, ...] = ()  # what makes the same choice without measuring; empty: the pass as it was given
    stored: tuple[Stored, ...] = ()  # each once, however many read it
    measured: str = ""  # what REPORT.md tells, in Markdown, and the manifest doesn't: times

    def to_json(self) -> dict[str, Any]:
        """What the manifest holds of it."""
        left, stored = ([dataclasses.asdict(item) for item in items] for items in (self.left, self.stored))
        return {"done": self.done, "of": self.of, "left": left} | ({"stored": stored} if stored else {})


@dataclass
class Outcome(ir.passes.PassResult):
    """A PassResult that also counts. `subject` is its place in the manifest: fused, quantized or pruned."""

    coverage: Coverage = Coverage(0, 0)
    subject: str = ""


@dataclass(frozen=True)
class Context:
    """What the pipeline hands to a pass."""

    module: nn.Module  # the untouched eager module
    feeds: Sequence[Feeds]  # inputs made from the text that may be used to choose something
    open: Callable[[ir.Model], Runner]  # a session on the target
    seed: int = 0
    provider: str = "cpu"
    isa: str = ""  # of the CPU to run on; empty: any
    probes: Sequence[Feeds] = ()  # any inputs that the module takes: to compare, not to choose by
    release: tuple[int, int] | None = None  # the oldest ONNX Runtime to run on; None: as old as the operators allow
    budget: Mapping[str, float] = field(default_factory=dict)  # what the caller asks for, with the keys of `--budget`
    drift: Callable[[Runner, Sequence[Feeds]], Mapping[str, float]] | None = (
        None  # from eager; the worst of all outputs
    )
    accuracy: Callable[[Runner], float] | None = None  # the share of labelled rows, kept for choosing, that are right
    open_cached: Callable[[ir.Model], Runner] | None = None  # as `open`, of a graph with a cache as it stands


@dataclass(frozen=True)
class Pass:
    """Fields of a subclass are options. `budget` is the drift that a lossy pass may cause, as `--budget` takes it."""

    context: Context | None = field(default=None, kw_only=True, repr=False, compare=False)
    budget: ClassVar[str | None] = None
    chooses_by_labels: ClassVar[bool] = False  # then labelled rows are split: those that it sees judge nothing

    @classmethod
    def name(cls) -> str:
        """The name of the file that defines the pass."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def options(cls) -> dict[str, dataclasses.Field[Any]]:
        return {option.name: option for option in dataclasses.fields(cls) if option.name != "context"}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `key=value, key=value`; PluginError names an unknown key, or a value of the wrong type."""
        given: dict[str, Any] = {}
        # A comma that no key follows belongs to the value before it.
        for item in filter(None, (part.strip() for part in re.split(r",(?=[^,]*=|\s*$)", text))):
            key, equals, value = (part.strip() for part in item.partition("="))
            option = cls.options().get(key)
            if option is None or not equals:
                known = ", ".join(cls.options()) or "none"
                raise PluginError(f"pass {cls.name()}: unknown option {item!r}; known: {known}")
            if key in given:
                raise PluginError(f"pass {cls.name()}: option {key} is given twice")
            given[key] = parse_value(f"pass {cls.name()}: option {key}", option.type, value)
        try:
            return cls(**given)
        except (TypeError, ValueError) as error:  # a missing option, or one that the pass refuses
            raise PluginError(f"pass {cls.name()}: {error}") from error

    def __str__(self) -> str:
        values = {key: getattr(self, key) for key in self.options()}
        text = ", ".join(f"{key}={format_value(value)}" for key, value in values.items())
        return f"{self.name()}{{{text}}}" if text else self.name()


class GraphPass(Pass, ir.passes.InPlacePass):
    """A pass over an `onnx_ir.Model`, in place; `call` returns an Outcome."""


class ModulePass(Pass, abc.ABC):
    """A pass over a module. `subject` is its place in the manifest."""

    subject: ClassVar[str] = "pruned"

    @abc.abstractmethod
    def apply(self, module: nn.Module) -> tuple[nn.Module, Coverage]:
        """A changed copy; the given module stays as it is."""


@dataclass(frozen=True)
class Pipeline:
    """Passes in order: module passes first. `typed` holds the names as typed, for a user's `file.py:Name`."""

    passes: tuple[Pass, ...]
    typed: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, find: Callable[[str], type[Pass]]) -> Self:
        """Read the text form; `find` gives the class for a name."""
        found, typed, position = [], [], 0
        while text[position:].strip():
            match = _ITEM.match(text, position)
            if match is None:
                raise PluginError(f"passes: can't read {text[position:].strip()!r}; expected NAME{{KEY=VALUE, ...}}")
            plugin = find(match["name"])
            if not (isinstance(plugin, type) and issubclass(plugin, Pass)):
                raise PluginError(f"passes: {match['name']} is no pass; a pass derives from GraphPass or ModulePass")
            found.append(plugin.parse(match["options"] or ""))
            typed.append(match["name"])
            position = match.end()
        return cls(tuple(found), tuple(typed))

    def __str__(self) -> str:
        typed = self.typed or tuple(item.name() for item in self.passes)
        return " ".join(
            name + str(item).removeprefix(item.name()) for name, item in zip(typed, self.passes, strict=True)
        )

    def run_module(
        self, module: nn.Module, context: Context, asked: Iterable[str], after: Callable[[ModulePass, Coverage], None]
    ) -> tuple[nn.Module, Self]:
        """Run the module passes; returns the changed copy, and the pipeline that repeats it without measuring."""
        repeating = list(self.passes)
        for index, item in enumerate(self.passes):
            if not isinstance(item, ModulePass):
                continue
            with _named(item):
                module, coverage = dataclasses.replace(item, context=context).apply(module)
            if not coverage.done and item.name() in asked:
                raise _unchanged(item, coverage)
            (repeating[index],) = _without_context(coverage.repeat) or (item,)
            after(item, coverage)
        return module, dataclasses.replace(self, passes=tuple(repeating))

    def run_graph(
        self, model: ir.Model, context: Context, asked: Iterable[str], after: Callable[[Pass, Outcome], None]
    ) -> Self:
        """Run the graph passes in place; one in `asked` must change something. Returns what did, for a repeat."""
        typed = self.typed or tuple(item.name() for item in self.passes)
        repeating: list[tuple[Pass, str]] = []
        for item, name in zip(self.passes, typed, strict=True):
            if not isinstance(item, GraphPass):
                repeating.append((item, name))
                continue
            with _named(item):
                outcome = dataclasses.replace(item, context=context)(model)
            if not isinstance(outcome, Outcome):
                raise PassError(f"pass {item.name()} returned {type(outcome).__name__}, not an Outcome")
            if not outcome.modified and item.name() in asked:
                raise _unchanged(item, outcome.coverage)
            if outcome.modified:
                repeat = _without_context(outcome.coverage.repeat) or (item,)
                repeating += [(each, name if type(each) is type(item) else each.name()) for each in repeat]
            after(item, outcome)
        return dataclasses.replace(
            self, passes=tuple(item for item, _ in repeating), typed=tuple(name for _, name in repeating)
        )


@contextmanager
def _named(item: Pass) -> Iterator[None]:
    try:
        yield
    except TxExportError:
        raise
    except Exception as error:  # a user's pass may raise anything
        cause = error.__cause__ or error
        raise PassError(f"pass {item.name()} raised {type(cause).__name__}: {cause}") from error


def _without_context(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    return tuple(dataclasses.replace(item, context=None) for item in passes)


def _unchanged(item: Pass, coverage: Coverage) -> PassError:
    reasons = "; ".join(f"{left.name}: {left.reason}" for left in coverage.left[:3])
    return PassError(f"pass {item.name()} changed nothing" + (f" ({reasons})" if reasons else "; leave it out"))
