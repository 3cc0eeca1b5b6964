"""The shape of the code: floors, plug-ins, names and lengths, read with `ast`."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tx_export

_ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = {"models": "tx_export.models", "quantize": "tx_export.quantize", "tx_export": "tx_export"}
_PLUGIN_PACKAGES = ("tx_export.models", "tx_export.quantize", "tx_export.optimize", "tx_export.providers")
_RUNTIME = ("tx_export.runtime", "tx_export.runtime_generate")
_FORBIDDEN = ("utils", "common", "helper", "helpers", "manager", "handler", "data", "info")


def _modules() -> dict[str, Path]:
    """Every module of the package by its installed name; the symlinks inside tx_export are not followed."""
    found = {}
    for folder, package in _FOLDERS.items():
        for path in sorted((_ROOT / folder).rglob("*.py")):
            parts = path.relative_to(_ROOT / folder).with_suffix("").parts
            if folder == "tx_export" and parts[0] in ("models", "quantize"):
                continue
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


_MODULES = _modules()
_TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in _MODULES.items()}
_PLUGINS = [
    name
    for name, path in _MODULES.items()
    if name.rpartition(".")[0] in _PLUGIN_PACKAGES and not path.name.startswith("_")
]


def _drawn_floors() -> dict[str, int]:
    """The floors that the docstring of the package draws; a name that ends in `.*` stands for a folder."""
    lines = re.findall(r"^ +(\d)  (\S+(?: {1,2}\S+)*)(?: {3,}.*)?$", tx_export.__doc__ or "", re.MULTILINE)
    return {name: int(floor) for floor, names in lines for name in names.split()}


_DRAWN = _drawn_floors()


@functools.cache
def _imports(name: str) -> tuple[str, ...]:
    """The modules of ours that a module imports, anywhere in it."""
    return tuple(_each_import(name))


def _each_import(name: str) -> Iterator[str]:
    for node in ast.walk(_TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "tx_export")
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tx_export":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in _MODULES else str(node.module)


def _is_private(name: str) -> bool:
    return bool(re.match(r"_[a-z]", name.rpartition(".")[2]))


@functools.cache
def _floor(name: str) -> float:
    """As drawn. A private neighbour stands on the lowest floor of those that import it, or just below a folder's."""
    if name == "tx_export":  # below all: it imports nothing
        return -1
    short = name.removeprefix("tx_export.")
    if (drawn := _DRAWN.get(short, _DRAWN.get(f"{short.split('.')[0]}.*"))) is not None:
        return drawn
    if _is_private(name):
        users = [_floor(other) - (not _neighbours(other, name)) / 2 for other in _MODULES if name in _imports(other)]
        # What is started as a program of its own has no importer: it stands where it may import the most.
        return min(users, default=max(_DRAWN.values()))
    raise AssertionError(f"{name} stands on no floor of tx_export/__init__.py")


def _neighbours(name: str, other: str) -> bool:
    return name.rpartition(".")[0] == other.rpartition(".")[0]


def _is_shared(name: str, used: str) -> bool:
    """Whether `used` may be imported from its own floor: a private neighbour, or what the families are built of."""
    return (
        (_is_private(used) and _neighbours(name, used))
        or used.startswith(("tx_export.models.parts", "tx_export.models.weights"))
        or (name, used) == ("tx_export.__main__", "tx_export.cli")
    )


def test_the_docstring_draws_every_floor() -> None:
    assert set(_DRAWN.values()) == set(range(9))


@pytest.mark.parametrize("name", _MODULES)
def test_a_module_imports_only_from_lower_floors(name: str) -> None:
    upward = [used for used in _imports(name) if _floor(used) >= _floor(name) and not _is_shared(name, used)]
    assert not upward, f"{name} (floor {_floor(name)}) imports {', '.join(upward)}"


def test_shared_files_stay_in_their_folder() -> None:
    strays = [
        f"{name} imports {used}"
        for name in _MODULES
        for used in _imports(name)
        if _is_private(used) and not name.startswith(used.rpartition(".")[0] + ".")
    ]
    assert not strays


@pytest.mark.parametrize("name", _PLUGINS)
def test_a_plugin_imports_no_other_plugin_and_names_its_one_class(name: str) -> None:
    assert not [used for used in _imports(name) if used in _PLUGINS]
    exported = _exported(name)
    classes = {node.name for node in _TREES[name].body if isinstance(node, ast.ClassDef)}
    assert exported is not None and len(exported) == 1 and exported[0] in classes


def _exported(name: str) -> list[str] | None:
    for node in _TREES[name].body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return [str(item) for item in ast.literal_eval(node.value)]
    return None


@pytest.mark.parametrize("name", _MODULES)
def test_all_comes_first_and_holds_what_others_import(name: str) -> None:
    exported = _exported(name)
    kinds = (ast.FunctionDef, ast.ClassDef)
    public = {node.name for node in _TREES[name].body if isinstance(node, kinds) and not node.name.startswith("_")}
    assert exported is not None or not public, "a module with public names has __all__"
    if exported is None:
        return
    assert len(exported) == len(set(exported))
    assert _imported_from(name) <= set(exported)
    first = next(node for node in _TREES[name].body if not _is_preamble(node))
    assert ast.unparse(first).startswith("__all__"), f"__all__ stands behind {ast.unparse(first)[:40]}"


def _imported_from(name: str) -> set[str]:
    nodes = [node for tree in _TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in nodes if node.module == name for alias in node.names}
    return {used for used in names if f"{name}.{used}" not in _MODULES}


def _is_preamble(node: ast.stmt) -> bool:
    """Docstring, imports, and the `if TYPE_CHECKING:` or import guard before them."""
    return isinstance(node, (ast.Expr, ast.Import, ast.ImportFrom, ast.If))


@pytest.mark.parametrize("name", _MODULES)
def test_files_functions_and_names_keep_to_the_style(name: str) -> None:
    text = _MODULES[name].read_text(encoding="utf-8")
    assert ast.get_docstring(_TREES[name]), "a module's first line says what it is for"
    if name not in _RUNTIME:
        assert len(text.splitlines()) <= 250
    for node in ast.walk(_TREES[name]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= 40, f"{node.name} has {lines} lines"
    words = name.rpartition(".")[2].strip("_").split("_")
    assert not set(words) & set(_FORBIDDEN)


@pytest.mark.parametrize("name", [name for name in _RUNTIME if name in _MODULES])
def test_the_runtime_stands_alone(name: str) -> None:
    allowed = {"numpy", "onnxruntime", "tokenizers", "run", *sys.stdlib_module_names}
    top = {_package(node) for node in _TREES[name].body if isinstance(node, (ast.Import, ast.ImportFrom))}
    everywhere = {_package(node) for node in ast.walk(_TREES[name]) if isinstance(node, (ast.Import, ast.ImportFrom))}
    assert everywhere <= allowed
    assert top - {"run"} <= {"numpy", *sys.stdlib_module_names}


def _package(node: ast.Import | ast.ImportFrom) -> str:
    return (node.names[0].name if isinstance(node, ast.Import) else node.module or ".").split(".")[0]


def test_the_package_itself_imports_nothing() -> None:
    nodes = _TREES["tx_export"].body
    assert [type(node) for node in nodes] == [ast.Expr, ast.Assign]
    assert ast.unparse(nodes[1]).startswith("__version__")


@pytest.mark.parametrize("folder", ["models", "quantize"])
def test_the_outer_folders_refuse_their_bare_name(folder: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); import {folder}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"ImportError: this folder installs as tx_export.{folder}" in done.stderr


@pytest.mark.parametrize("command", [[], ["build"], ["run"], ["bench"], ["train"]])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    code = (
        "import sys\n"
        "from tx_export.cli import main\n"
        f"try: main({[*command, '--help']!r})\n"
        "except SystemExit as done: assert done.code == 0\n"
        "heavy = {'torch', 'numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'tokenizers', 'rich', 'matplotlib'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: tx-export")
    assert done.stdout.endswith("heavy: []\n")
