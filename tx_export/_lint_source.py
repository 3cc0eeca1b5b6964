"""Lines found in the user's source where no call passes by: what assigns an attribute, and where a class begins."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

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
    """The module's class and its bases, as far as they are the user's, with the line numbers of their files."""
    for kind in type(part).__mro__:
        try:
            file, (source, first) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
        except (OSError, TypeError):
            continue
        if file is None or not is_users(file):
            continue
        tree = ast.parse(textwrap.dedent("".join(source)))
        ast.increment_lineno(tree, first - 1)
        yield from ((file, node) for node in tree.body if isinstance(node, ast.ClassDef))


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
