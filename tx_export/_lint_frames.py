"""Whose line is it: from a stack of frames to the user's file, line, source text and module path."""

from __future__ import annotations

import functools
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Literal

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import uninteresting_files

import tx_export

__all__ = ["Paths", "Place", "is_users", "module_paths", "place_here", "place_in_text", "place_of_error"]

Through = Literal["user", "operator", "torch", "library"]
Paths = Mapping[int, str]  # id of a module -> its dotted path
_Frame = tuple[FrameType, int, int]  # with line and instruction, which a traceback keeps for itself

_WRITTEN = re.compile(r'File "([^"]+)", line (\d+)')
_FURTHER: tuple[Through, ...] = ("user", "operator", "torch", "library")
_CALLS = str(Path("torch", "_export", "non_strict_utils.py"))  # every operator is called from here while tracing
_STANDARD = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib"))


@dataclass(frozen=True)
class Place:
    """The user's line that did something, or that called the library which did."""

    file: str
    line: int
    code: str  # the expression, on one line
    module: str  # dotted path of the innermost module at work, or the class of the outermost
    through: Through = "user"  # that line itself did it, or an operator, torch's Python code, a library that it called


def module_paths(root: nn.Module) -> Paths:
    """Dotted paths as the user knows them: a wrapper of ours around the module doesn't count."""
    inner = root
    while type(inner).__module__.startswith("tx_export.") and len(children := list(inner.children())) == 1:
        inner = children[0]
    name = type(inner).__name__
    return {id(root): name} | {id(part): path or name for path, part in inner.named_modules()}


def is_users(file: str) -> bool:
    """Whether a Python file is neither ours nor torch's, an installed package's or the standard library's."""
    return _owner(file) == "user"


def place_here(paths: Paths) -> Place | None:
    """Of the call that is running, None where no frame is the user's."""
    return _place(list(_callers(sys._getframe(1))), paths)


def place_of_error(error: BaseException, paths: Paths) -> Place | None:
    """Where it was raised."""
    frames = list(_traced(error.__traceback__))
    return _place(frames[::-1], paths)


def place_in_text(stack: str, module: str) -> Place | None:
    """The user's line of a stack that torch wrote down as text."""
    found = [(file, int(line)) for file, line in _WRITTEN.findall(stack) if is_users(file)]
    if not found:
        return None
    file, line = found[-1]
    return Place(file, line, linecache.getline(file, line).strip(), module, "operator")


def _callers(frame: FrameType | None) -> Iterator[_Frame]:
    while frame is not None:
        yield frame, frame.f_lineno, frame.f_lasti
        frame = frame.f_back


def _traced(trace: TracebackType | None) -> Iterator[_Frame]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno, trace.tb_lasti
        trace = trace.tb_next


def _place(frames: list[_Frame], paths: Paths) -> Place | None:
    """From the innermost frame outwards to the first of the user's."""
    through: Through = "user"
    for frame, line, instruction in frames:
        owner = _owner(frame.f_code.co_filename)
        if owner == "user":
            module = _module(frames, paths)
            code = _source(frame.f_code, line, instruction)
            return None if module is None else Place(frame.f_code.co_filename, line, code, module, through)
        if owner != "machinery":
            through = max(through, owner, key=_FURTHER.index)
    return None


def _module(frames: list[_Frame], paths: Paths) -> str | None:
    """The innermost module whose method is running; None outside of the model."""
    for frame, _, _ in frames:
        for name in frame.f_code.co_varnames[:1]:  # self, whatever it is called
            if (path := paths.get(id(frame.f_locals.get(name)))) is not None:
                return path
    return None


@functools.cache
def _owner(file: str) -> Through | Literal["machinery"]:
    """Whose code a file is; machinery is what stands between a call and what it calls."""
    if file in uninteresting_files() or file.startswith("<"):
        return "machinery"
    if file.endswith(_CALLS):
        return "operator"
    path = Path(file)
    if path.is_relative_to(Path(torch.__file__).parent):
        return "torch"
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return "library"
    resolved = path.resolve()
    ours = Path(tx_export.__file__).resolve().parent
    if any(resolved.is_relative_to(folder.resolve()) for folder in (ours, ours / "models", ours / "quantize")):
        return "machinery"
    return "machinery" if file.startswith(_STANDARD) else "user"


def _source(code: CodeType, line: int, instruction: int) -> str:
    """The text of the expression that the instruction belongs to; of a compound statement its first line."""
    start, end, first, last = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if start is None or end is None or first is None or last is None:
        return linecache.getline(code.co_filename, line).strip()
    lines = [linecache.getline(code.co_filename, number) for number in range(start, end + 1)]
    lines[-1] = lines[-1].encode()[:last].decode()
    lines[0] = lines[0].encode()[first:].decode()
    if len(lines) > 1 and lines[0].rstrip().endswith(":"):
        return lines[0].strip().removesuffix(":")
    return " ".join(" ".join(lines).split()) or linecache.getline(code.co_filename, line).strip()
