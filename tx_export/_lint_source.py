"""Lines found in the user's source where no call passes by: what assigns an attribute, and where a class begins."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from types import FunctionType

from torch import nn

from tx_export._lint_frames import Place, is_users

__all__ = ["assigned_at", "defined_at"]

_CHANGERS = ("add", "append", "clear", "extend", "insert", "pop", "setdefault", "update")  # of lists, dicts and sets


def defined_at(part: nn.Module, path: str) -> Place | None:
    """The line of a module's class; None where it isn't the user's."""
    return next((Place(file, tree.lineno, f"class {tree.name}", path) for file, tree in _classes(part)), None)


def assigned_at(part: nn.Module, path: str, attribute: str) -> Place | None:
    """The first line outside of __init__ that writes to an attribute, else where the class begins."""
    for file, tree in _classes(part):
        methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
        nodes = (node for method in methods for node in ast.walk(method) if isinstance(node, ast.stmt | ast.expr))
        for node in sorted((node for node in nodes if _writes(node, attribute)), key=lambda node: node.lineno):
            return Place(file, node.lineno, " ".join(ast.unparse(node).split()), path)
    return defined_at(part, path)


def _classes(part: nn.Module) -> Iterator[tuple[str, ast.ClassDef]]:
    """The module's class and its bases, as far as they are the user's, found by the lines of their methods."""
    for kind in type(part).__mro__:
        method = next((value for value in vars(kind).values() if isinstance(value, FunctionType)), None)
        file = "" if method is None else method.__code__.co_filename
        if method is None or not is_users(file):
            continue
        classes = [node for node in ast.walk(_parsed(file)) if isinstance(node, ast.ClassDef)]
        first = method.__code__.co_firstlineno
        around = [node for node in classes if node.lineno <= first <= (node.end_lineno or 0)]
        yield from ((file, node) for node in around[-1:])


def _parsed(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # it has changed since it was imported
        return ast.Module([], [])


def _writes(node: ast.AST, attribute: str) -> bool:
    if isinstance(node, ast.Assign):
        return any(_is(target, attribute) for each in node.targets for target in ast.walk(each))
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return any(_is(target, attribute) for target in ast.walk(node.target))
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr in ("register_buffer", "setattr"):
        return any(isinstance(value, ast.Constant) and value.value == attribute for value in node.args)
    changes = node.func.attr in _CHANGERS or node.func.attr.endswith("_")
    return changes and any(_is(value, attribute) for value in ast.walk(node.func.value))


def _is(node: ast.AST, attribute: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == attribute
