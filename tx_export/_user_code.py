"""Code of others: import it from `path/to/file.py:NAME` or `package.module:NAME`, and guard whatever it raises.

Its folder (the current one for a package) comes first on sys.path while it loads; nothing of it stays there.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType, TracebackType
from typing import Any

from tx_export.errors import PluginError, TxExportError

__all__ = ["foreign", "import_object", "import_source", "importable", "member"]

_LIBRARIES = tuple(
    {sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")} | {*site.getsitepackages(), "<"}
)


def import_object(reference: str) -> Any:
    """The object that a reference names; its errors become PluginError."""
    return member(import_source(reference), reference)


def import_source(reference: str) -> ModuleType:
    """The Python module in which a reference's object is; PluginError if it can't be imported."""
    place, name = _split(reference)
    if not place or not all(part.isidentifier() for part in name.split(".")):
        raise PluginError(f"{reference!r}: expected path/to/file.py:NAME or package.module:NAME")
    return _import_file(Path(place)) if place.endswith(".py") else _import_module(place)


def member(source: ModuleType, reference: str) -> Any:
    """What NAME of the reference is in its module, dotted names too; PluginError lists what could be meant."""
    place, name = _split(reference)
    found: Any = source
    for part in name.split("."):
        with foreign(f"{reference}: looking it up", PluginError):
            candidates = _candidates(found)
            present = hasattr(found, part)
            found = getattr(found, part, None)
        if not present:
            close = difflib.get_close_matches(part, candidates, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise PluginError(f"{place} has no {part!r}; it has {', '.join(candidates) or 'nothing'}{hint}")
        place = part if place == _split(reference)[0] else f"{place}.{part}"
    return found


@contextmanager
def importable(reference: str) -> Iterator[None]:
    """What the code of a reference imports, in functions that run later too, is found while this is open."""
    place, _ = _split(reference)
    folders = _folders(Path(place)) if place.endswith(".py") else [_current_folder()]
    with ExitStack() as opened:
        for folder in folders:
            opened.enter_context(_on_path(folder))
        yield


@contextmanager
def foreign(what: str, kind: type[TxExportError]) -> Iterator[None]:
    """Around code that isn't ours: whatever it raises becomes an error of that kind, with the line of the user's code.

    KeyboardInterrupt passes: it is the person at the keyboard.
    """
    try:
        yield
    except TxExportError:
        raise
    except (Exception, SystemExit) as error:
        raise kind(f"{_place(error)}{what} raised {type(error).__name__}: {error}") from error


def _split(reference: str) -> tuple[str, str]:
    place, _, name = reference.rpartition(":")
    return place, name


def _candidates(owner: Any) -> list[str]:
    """Public names of what can be called and was made here, not imported."""
    home = owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", None)
    public = {name: value for name, value in vars(owner).items() if not name.startswith("_") and callable(value)}
    made = (type, FunctionType, BuiltinFunctionType)
    return [name for name, value in public.items() if not isinstance(value, made) or value.__module__ == home]


def _place(error: BaseException) -> str:
    """`file:line: ` of the innermost line that is neither a library's nor ours; empty without one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}: "
    found, step = "", error.__traceback__
    while step is not None:
        if _is_users(step):
            found = f"{_shown(step.tb_frame.f_code.co_filename)}:{step.tb_lineno}: "
        step = step.tb_next
    return found


def _is_users(step: TracebackType) -> bool:
    ours = step.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "tx_export"
    return not ours and not step.tb_frame.f_code.co_filename.startswith(_LIBRARIES)


def _shown(file: str) -> str:
    """Relative to the current folder where the file is below it."""
    try:
        return str(Path(file).relative_to(_current_folder()))
    except ValueError:
        return file


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PluginError(f"{path}: no such file")
    *_, top = _folders(path)
    if top != path.resolve().parent:
        dotted = ".".join(path.resolve().relative_to(top).with_suffix("").parts)
        with importable(f"{path}:"), foreign(f"{path}: importing it", PluginError):
            return importlib.import_module(dotted)
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    known = _is_known(path.stem)
    with _on_path(top), foreign(f"{path}: importing it", PluginError):
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


def _folders(path: Path) -> list[Path]:
    """The file's folder; then, if it has relative imports, the one that holds the package they are in."""
    parents = list(path.resolve().parents)
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return parents[:1]  # importing it says what is wrong
    levels = max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)
    packages = next(count for count, folder in enumerate(parents) if not _is_package(folder))
    return [parents[0], *parents[max(levels, packages) :][:1]] if levels else parents[:1]


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()


def _is_known(name: str) -> bool:
    """Whether an import of this name finds something without the user's folder, say an installed package."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return name in sys.modules


def _import_module(name: str) -> ModuleType:
    with _on_path(_current_folder()), foreign(f"{name}: importing it", PluginError):
        return importlib.import_module(name)


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was deleted
        return Path("/")


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
    try:
        own = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    except OSError:
        return []  # a folder that may not be listed can still be imported from
    own -= {"tx_export", "__main__", *sys.stdlib_module_names}
    reachable = {None, folder, *(Path(entry).resolve() for entry in sys.path)}
    foreign = {name for name in own & set(sys.modules) if _home(sys.modules[name]) not in reachable}
    return [name for name in sys.modules if name.partition(".")[0] in foreign]


def _home(module: ModuleType) -> Path | None:
    """The folder in which a top-level module, or package, lies."""
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
    return Path(places[0]).resolve().parent if places[0] else None
