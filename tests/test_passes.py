"""The text form of passes and pipelines, and how a pipeline runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tx_export.errors import PassError, PluginError
from tx_export.passes import Context, Coverage, GraphPass, Left, ModulePass, Outcome, Pass, Pipeline
from tx_export.testing import graph_from_text

_GRAPH = '<ir_version: 8, opset_import: ["" : 18]> g (float[2] x) => (float[2] y) { y = Neg(x) }'


@dataclass(frozen=True)
class _Rename(GraphPass):
    """Gives the graph another name; with an empty one it changes nothing."""

    to: str = "renamed"
    times: int = 1
    ratio: float = 0.5
    deep: bool = True
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.times < 0:
            raise ValueError(f"times is {self.times}; it must not be negative")

    def call(self, model: ir.Model) -> Outcome:
        assert self.context is not None
        if not self.to:
            return Outcome(model, False, Coverage(0, 1, (Left("g", "it has its name"),)), "fused")
        model.graph.name = f"{model.graph.name}>{self.to}"
        return Outcome(model, True, Coverage(1, 1), "fused")


@dataclass(frozen=True)
class _Same(ModulePass):
    """Never called by run_graph."""

    def apply(self, module: nn.Module) -> tuple[nn.Module, Coverage]:
        raise AssertionError


@dataclass(frozen=True)
class _Needy(GraphPass):
    """Has an option without a default."""

    bits: int

    def call(self, model: ir.Model) -> Outcome:
        raise AssertionError


class _Plain(GraphPass):
    """Forgets to count."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, True)


def _find(name: str) -> type[Pass]:
    known: dict[str, type[Pass]] = {"rename": _Rename, "my/own.py:Rename": _Rename, "same": _Same}
    return known[name]


def _context() -> Context:
    def refused(model: ir.Model) -> Any:
        raise AssertionError

    return Context(module=nn.Identity(), feeds=(), open=refused)


def _run(passes: Sequence[Pass], asked: Sequence[str] = ()) -> tuple[ir.Model, list[tuple[Pass, Outcome]]]:
    model, seen = graph_from_text(_GRAPH), []
    Pipeline(tuple(passes)).run_graph(model, _context(), asked, lambda item, outcome: seen.append((item, outcome)))
    return model, seen


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    to=st.from_regex(r"[a-z][a-z0-9_-]{0,6}", fullmatch=True),
    times=st.integers(0, 10**9),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    deep=st.booleans(),
    limit=st.none() | st.integers(),
)
def test_the_text_form_of_a_pipeline_gives_the_same_pipeline_back(
    to: str, times: int, ratio: float, deep: bool, limit: int | None
) -> None:
    passes = (_Rename(to, times, ratio, deep, limit), _Same(), _Rename())
    pipeline = Pipeline(passes, ("rename", "same", "my/own.py:Rename"))
    read = Pipeline.parse(str(pipeline), _find)
    assert read.passes == pipeline.passes
    assert str(read) == str(pipeline)


def test_a_pass_is_named_by_its_file_and_shows_its_options_but_not_its_context() -> None:
    shown = str(_Rename(context=_context(), deep=False))
    assert shown == "test_passes{to=renamed, times=1, ratio=0.5, deep=false, limit=None}"
    assert str(_Same()) == "test_passes"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("  \n", 0),
        ("rename", 1),
        (" rename{}   same\n\tsame ", 3),
        ("rename{ to = a ,times=2 , }", 1),
        ("my/own.py:Rename{times=1}  rename{deep=False}", 2),
    ],
)
def test_spaces_and_empty_braces_do_not_matter(text: str, count: int) -> None:
    assert len(Pipeline.parse(text, _find).passes) == count


@pytest.mark.parametrize(
    "text",
    ["rename{", "rename}", "{times=1}", "rename{times=1}same", "rename {times=1}", "rename{{times=1}}", "rename,same"],
)
def test_a_pipeline_that_is_malformed_shows_where(text: str) -> None:
    with pytest.raises(PluginError, match=r"passes: can't read .*expected NAME\{KEY=VALUE, ...\}"):
        Pipeline.parse(text, _find)


def test_without_typed_names_a_pipeline_shows_the_names_of_files() -> None:
    assert str(Pipeline((_Same(), _Same()))) == "test_passes test_passes"


def test_bools_are_read_in_any_case_and_numbers_get_the_type_of_their_option() -> None:
    read = _Rename.parse("deep=FALSE, ratio=1, times=3, limit=4")
    assert read == _Rename(deep=False, ratio=1.0, times=3, limit=4)
    assert str(read) == "test_passes{to=renamed, times=3, ratio=1.0, deep=false, limit=4}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=9", r"unknown option 'speed=9'; known: to, times, ratio, deep, limit"),
        ("times", r"unknown option 'times'; known: to"),
        ("context=1", r"unknown option 'context=1'"),
        ("times=1.5", r"option times is a int, not '1.5'"),
        ("times=true", r"option times is a int, not 'true'"),
        ("times=", r"option times is a int, not ''"),
        ("ratio=[1]", r"option ratio is a float, not '\[1\]'"),
        ("ratio='a'", r"option ratio is a float"),
        ("ratio=nan", r"option ratio is 'nan', which is not finite"),
        ("ratio=1e999", r"option ratio is '1e999', which is not finite"),
        ("deep=1", r"option deep is true or false, not '1'"),
        ("times=1, times=2", r"option times is given twice"),
        ("times=-1", r"times is -1; it must not be negative"),
    ],
)
def test_an_option_that_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(PluginError, match=f"pass test_passes: {message}"):
        _Rename.parse(text)


def test_an_option_without_a_default_must_be_given() -> None:
    with pytest.raises(PluginError, match=r"pass test_passes: .*bits"):
        _Needy.parse("")
    assert _Needy.parse("bits=4").bits == 4


def test_a_pass_without_options_says_so() -> None:
    with pytest.raises(PluginError, match=r"unknown option 'times=1'; known: none"):
        _Same.parse("times=1")


def test_graph_passes_run_in_order_with_their_outcomes_and_module_passes_are_left_out() -> None:
    first, second = _Rename("a"), _Rename("b")
    model, seen = _run([_Same(), first, second])
    assert model.graph.name == "g>a>b"
    assert [item for item, _ in seen] == [first, second]
    assert all(outcome.coverage == Coverage(1, 1) and outcome.subject == "fused" for _, outcome in seen)


def test_a_pass_that_was_asked_for_and_changed_nothing_is_an_error_with_its_reasons() -> None:
    with pytest.raises(PassError, match=r"pass test_passes changed nothing \(g: it has its name\)"):
        _run([_Rename("")], asked=["test_passes"])


def test_a_pass_that_nobody_asked_for_may_change_nothing() -> None:
    _, seen = _run([_Rename("")], asked=["other"])
    assert [outcome.modified for _, outcome in seen] == [False]


def test_the_pipeline_that_repeats_a_run_leaves_out_what_changed_nothing() -> None:
    pipeline = Pipeline((_Same(), _Rename("a"), _Rename("")), ("same", "mine.py:A", "mine.py:Idle"))
    repeating = pipeline.run_graph(graph_from_text(_GRAPH), _context(), (), lambda item, outcome: None)
    assert (repeating.passes, repeating.typed) == ((_Same(), _Rename("a")), ("same", "mine.py:A"))


def test_later_passes_do_not_run_after_one_that_failed() -> None:
    model, seen = graph_from_text(_GRAPH), []
    pipeline = Pipeline((_Rename("a"), _Rename(""), _Rename("c")))
    with pytest.raises(PassError):
        pipeline.run_graph(model, _context(), ["test_passes"], lambda item, outcome: seen.append(item))
    assert model.graph.name == "g>a"
    assert seen == [_Rename("a")]


def test_a_pass_that_does_not_count_is_refused() -> None:
    with pytest.raises(PassError, match=r"pass test_passes returned PassResult, not an Outcome"):
        _run([_Plain()])


def test_coverage_turns_into_json() -> None:
    coverage = Coverage(1, 2, (Left("layer.0", "too small"),))
    assert coverage.to_json() == {"done": 1, "of": 2, "left": [{"name": "layer.0", "reason": "too small"}]}


@dataclass(frozen=True)
class _Raises(GraphPass):
    def call(self, model: ir.Model) -> Outcome:
        raise ValueError("boom")


def test_a_pass_that_raises_is_named_with_what_it_raised() -> None:
    model = ir.Model(ir.Graph([], [], nodes=[], name="empty"), ir_version=8)
    with pytest.raises(PassError, match=r"pass test_passes raised ValueError: boom"):
        Pipeline((_Raises(),)).run_graph(model, cast(Context, None), (), lambda item, outcome: None)


def test_what_is_no_pass_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match=r"passes: stranger is no pass; a pass derives from GraphPass or ModulePass"):
        Pipeline.parse("stranger", lambda name: cast(type[Pass], int))


@dataclass(frozen=True)
class _Shrink(ModulePass):
    """Takes lines from a product: those given, else as many as asked for, from the end."""

    lines: str = ""
    count: int = 1

    def apply(self, module: nn.Module) -> tuple[nn.Module, Coverage]:
        assert self.context is not None and isinstance(module, nn.Linear)
        if self.count < 0:
            raise RuntimeError("fewer than none")
        count = len(self.lines.split(",")) if self.lines else self.count
        lines = ",".join(map(str, range(module.out_features - count, module.out_features)))
        done = nn.Linear(module.in_features, module.out_features - count)
        left = () if count else (Left("lines", "none were asked for"),)
        return done, Coverage(count, module.out_features, left, repeat=(_Shrink(lines),) if count else ())


def _shrunk(*passes: Pass, asked: Sequence[str] = ()) -> tuple[nn.Module, Pipeline, list[int]]:
    seen: list[int] = []
    module, repeating = Pipeline(passes).run_module(
        nn.Linear(2, 9), _context(), asked, lambda item, coverage: seen.append(coverage.done)
    )
    return module, repeating, seen


def test_module_passes_follow_each_other_and_the_pipeline_holds_their_choice() -> None:
    module, repeating, seen = _shrunk(_Shrink(count=3), _Rename(), _Shrink(count=2))
    assert module.out_features == 4 and seen == [3, 2]
    assert str(repeating).startswith("test_passes{lines=6,7,8, count=1} test_passes{to=")
    assert str(repeating).endswith("} test_passes{lines=4,5, count=1}")
    again, same, _ = _shrunk(*repeating.passes)
    assert again.out_features == 4 and same == repeating


def test_a_module_pass_that_was_asked_for_must_change_something() -> None:
    assert _shrunk(_Shrink(count=0))[2] == [0]
    with pytest.raises(PassError, match=r"pass test_passes changed nothing \(lines: none were asked for\)"):
        _shrunk(_Shrink(count=0), asked=["test_passes"])


def test_what_a_module_pass_raises_is_told_under_its_name() -> None:
    with pytest.raises(PassError, match="pass test_passes raised RuntimeError: fewer than none"):
        _shrunk(_Shrink(count=-1))


def test_a_comma_that_no_key_follows_belongs_to_the_value_before_it() -> None:
    assert _Shrink.parse("lines=1,2,3, count=4") == _Shrink("1,2,3", 4)
    assert _Shrink.parse("count=4,lines=1,2") == _Shrink("1,2", 4)
    with pytest.raises(PluginError, match=r"unknown option '1'; known: lines, count"):
        _Shrink.parse("1,lines=2")
