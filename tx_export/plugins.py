"""Find a model, pass or provider by the name of its file, or a user's by `file.py:Name`."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from tx_export.errors import PluginError, TxExportError

__all__ = ["Kind", "find", "foreign", "import_object", "names", "summary"]

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
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None:
        return ""
    for line in Path(spec.origin).read_text(encoding="utf-8").splitlines():
        if line.startswith('"""'):
            return line.strip('"').strip()
    return ""


def import_object(reference: str) -> Any:
    """The object that `path/to/file.py:NAME` or `package.module:NAME` names; its errors become PluginError."""
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise PluginError(f"{reference!r}: expected path/to/file.py:NAME or package.module:NAME")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    try:
        return getattr(module, name)
    except AttributeError as error:
        public = ", ".join(key for key in vars(module) if not key.startswith("_")) or "nothing"
        raise PluginError(f"{place} has no {name!r}; it has {public}") from error


def _modules(kind: Kind) -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES[kind]:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if not module.name.startswith("_") and not module.ispkg:
                found[module.name] = f"{package}.{module.name}"
    return found


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PluginError(f"{path}: no such file")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    known = _is_known(path.stem)
    with _on_path(path.resolve().parent), foreign(f"{path}: importing it", PluginError):
        # Pickling and dataclasses look a module up by name while its body runs.
        previous = sys.modules.get(path.stem)
        sys.modules[path.stem] = module
        loaded = False
        try:
            spec.loader.exec_module(module)
            loaded = True
        finally:
            if previous is not None:
                sys.modules[path.stem] = previous
            elif known or not loaded:
                sys.modules.pop(path.stem, None)
    return module


def _is_known(name: str) -> bool:
    """Whether an import of this name finds something without the user's folder, say an installed package."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return name in sys.modules


def _import_module(name: str) -> ModuleType:
    with _on_path(Path.cwd()), foreign(f"{name}: importing it", PluginError):
        return importlib.import_module(name)


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """This folder comes first while its code loads, and its modules before same-named ones of another user's folder."""
    before = list(sys.path)
    hidden = {name: sys.modules.pop(name) for name in _strangers(folder)}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
        for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _strangers(folder: Path) -> list[str]:
    """Modules named like something in this folder that came from a folder that is no longer on sys.path."""
    own = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    own -= {"tx_export", "__main__", *sys.stdlib_module_names}
    reachable = {None, folder, *(Path(entry).resolve() for entry in sys.path)}
    foreign = {name for name in own & set(sys.modules) if _home(sys.modules[name]) not in reachable}
    return [name for name in sys.modules if name.partition(".")[0] in foreign]


def _home(module: ModuleType) -> Path | None:
    """The folder in which a top-level module, or package, lies."""
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
    return Path(places[0]).resolve().parent if places[0] else None


@contextmanager
def foreign(what: str, kind: type[TxExportError]) -> Iterator[None]:
    """Around code that isn't ours: whatever it raises becomes an error of the tree, of that kind."""
    try:
        yield
    except TxExportError:
        raise
    except (Exception, SystemExit) as error:
        raise kind(f"{what} raised {type(error).__name__}: {error}") from error
