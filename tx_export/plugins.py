"""Find a model, pass or provider by the name of its file, or a user's by `file.py:Name`."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tx_export._user_code import foreign, import_object, import_source, importable, member
from tx_export.errors import PluginError

__all__ = [
    "Kind",
    "find",
    "foreign",
    "import_object",
    "import_source",
    "importable",
    "member",
    "names",
    "summary",
]

Kind = Literal["model", "pass", "provider"]

_PACKAGES: dict[Kind, tuple[str, ...]] = {
    "model": ("tx_export.models",),
    "pass": ("tx_export.quantize", "tx_export.optimize"),
    "provider": ("tx_export.providers",),
}


def names(kind: Kind) -> list[str]:
    """The names of all plug-ins of a kind, as they are typed, sorted; nothing is imported but the folders."""
    return sorted(name.replace("_", "-") if kind == "model" else name for name in _modules(kind))


def find(kind: Kind, name: str) -> Any:
    """The class that the plug-in's `__all__` names; PluginError lists what there is."""
    if ".py:" in name:
        return import_object(name)
    modules = _modules(kind)
    module_name = modules.get(name.replace("-", "_"))
    if module_name is None:
        close = difflib.get_close_matches(name, names(kind), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise PluginError(f"unknown {kind} {name!r}; known: {', '.join(names(kind))}{hint}")
    module = importlib.import_module(module_name)
    return getattr(module, module.__all__[0])


def summary(kind: Kind, name: str) -> str:
    """The first line of the plug-in's docstring, read without importing it."""
    module_name = _modules(kind)[name.replace("-", "_")]
    spec = find_spec(module_name)
    if spec is None or spec.origin is None:
        return ""
    for line in Path(spec.origin).read_text(encoding="utf-8").splitlines():
        if line.startswith('"""'):
            return line.strip('"').strip()
    return ""


def _modules(kind: Kind) -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES[kind]:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if not module.name.startswith("_") and not module.ispkg:
                found[module.name] = f"{package}.{module.name}"
    return found
