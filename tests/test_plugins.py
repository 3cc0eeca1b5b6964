"""Plug-ins are found by the name of their file, and a user's own by file.py:Name; foreign code can't harm us."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tx_export import plugins
from tx_export.errors import PluginError
from tx_export.models.classifier import Classifier
from tx_export.passes import Pass


@pytest.fixture(autouse=True)
def _modules_as_before() -> Iterator[None]:
    """What a test imports stays in that test."""
    modules, path = dict(sys.modules), list(sys.path)
    yield
    assert sys.path == path
    for name in set(sys.modules) - set(modules):
        if not (getattr(sys.modules[name], "__file__", None) or "").startswith(sys.prefix):
            del sys.modules[name]


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_each_kind_lists_its_folders() -> None:
    assert {"bert", "classifier", "embedder"} <= set(plugins.names("model"))
    assert {"dynamic_int8", "fold_constants", "pack_qkv"} <= set(plugins.names("pass"))
    assert {"cpu", "cuda"} <= set(plugins.names("provider"))


@pytest.mark.parametrize("kind", ["model", "pass", "provider"])
def test_names_are_sorted_and_hold_no_shared_file(kind: plugins.Kind) -> None:
    names = plugins.names(kind)
    assert names == sorted(names)
    assert not [name for name in names if name.startswith("_") or name in ("parts", "weights")]


@pytest.mark.parametrize("kind", ["model", "pass", "provider"])
def test_every_plugin_is_found_under_its_name_and_summed_up(kind: plugins.Kind) -> None:
    for name in plugins.names(kind):
        found = plugins.find(kind, name)
        assert found.__module__.rpartition(".")[2] == name.replace("-", "_")
        assert plugins.summary(kind, name)


def test_the_name_of_a_pass_is_the_one_it_is_found_by() -> None:
    for name in plugins.names("pass"):
        assert issubclass(plugins.find("pass", name), Pass)
        assert plugins.find("pass", name).name() == name


@pytest.mark.parametrize("name", ["dynamic_int8", "dynamic-int8"])
def test_hyphens_and_underscores_are_the_same(name: str) -> None:
    assert plugins.find("pass", name).__name__ == "DynamicInt8"


def test_an_unknown_name_lists_the_known_and_suggests_the_closest() -> None:
    with pytest.raises(PluginError, match=r"unknown model 'clasifier'; known: .*bert.*; did you mean classifier\?"):
        plugins.find("model", "clasifier")
    with pytest.raises(PluginError, match=r"unknown provider 'quantum'; known: cpu, cuda[^?]*$"):
        plugins.find("provider", "quantum")


def test_a_users_class_is_found_by_its_file(tmp_path: Path) -> None:
    file = _write(tmp_path / "mine.py", "class Net:\n    answer = 42\n")
    assert plugins.find("pass", f"{file}:Net").answer == 42
    assert plugins.import_object(f"{file}:Net").answer == 42


def test_a_dataclass_with_postponed_annotations_loads(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "@dataclass(frozen=True)\n"
        "class Options:\n"
        "    kind: ClassVar[str] = 'a'\n"
        "    bits: int = 4\n"
    )
    options = plugins.import_object(f"{_write(tmp_path / 'mine.py', text)}:Options")
    # Reference: dataclasses leaves a ClassVar out of the fields only if it can look the module up by name.
    assert list(options.__dataclass_fields__) == ["kind", "bits"]
    assert repr(options()) == "Options(bits=4)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_of_this_name", r"broken\.py: importing it raised ModuleNotFoundError: .*nothing_of_this_name"),
        ("raise ValueError('no luck')", r"broken\.py: importing it raised ValueError: no luck"),
        ("raise SystemExit(3)", r"broken\.py: importing it raised SystemExit: 3"),
        ("def f(:", r"broken\.py: importing it raised SyntaxError"),
        ("def x(): pass\n_y = 2\n", r"broken\.py has no 'Net'; it has x$"),
        ("", r"broken\.py has no 'Net'; it has nothing"),
    ],
)
def test_a_users_file_that_is_broken_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = _write(tmp_path / "broken.py", text)
    with pytest.raises(PluginError, match=message):
        plugins.import_object(f"{file}:Net")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_bytes(b"\x00\xff\xfe")
    with pytest.raises(PluginError, match=r"broken\.py: importing it raised SyntaxError"):
        plugins.import_object(f"{tmp_path / 'broken.py'}:Net")


@pytest.mark.parametrize("reference", ["Net", ":Net", "file.py:", "file.py:a b", "pkg.mod:1x", ""])
def test_a_reference_of_the_wrong_form_shows_the_right_one(reference: str) -> None:
    with pytest.raises(PluginError, match=r"expected path/to/file\.py:NAME or package\.module:NAME"):
        plugins.import_object(reference)


def test_a_missing_file_and_a_missing_package_are_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"gone\.py: no such file"):
        plugins.import_object(f"{tmp_path / 'gone.py'}:Net")
    with pytest.raises(PluginError, match=r"gone_package\.mod: importing it raised ModuleNotFoundError"):
        plugins.import_object("gone_package.mod:Net")


def test_a_file_that_failed_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(PluginError):
        plugins.import_object(f"{_write(tmp_path / 'half_done.py', 'x = 1; raise ValueError')}:x")
    assert "half_done" not in sys.modules


@pytest.mark.parametrize("package", ["models", "utils", "quantize"])
def test_a_users_own_package_of_a_common_name_works_beside_ours(package: str, tmp_path: Path) -> None:
    _write(tmp_path / package / "__init__.py", "")
    _write(tmp_path / package / "net.py", "class Net:\n    place = __file__\n")
    file = _write(tmp_path / "train_script.py", f"from {package}.net import Net\n")
    place = Path(plugins.import_object(f"{file}:Net").place)
    assert place == tmp_path / package / "net.py"
    assert plugins.find("model", "classifier") is Classifier


@pytest.mark.parametrize("package", [True, False])
def test_two_folders_with_a_module_of_the_same_name_each_get_their_own(package: bool, tmp_path: Path) -> None:
    for owner in ("ann", "bob"):
        place = "models/__init__.py" if package else "models.py"
        _write(tmp_path / owner / place, "from nets import owner\n")
        _write(tmp_path / owner / "nets.py", f"owner = {owner!r}\n")
        _write(tmp_path / owner / "entry.py", "from models import owner\n")
    found = [plugins.import_object(f"{tmp_path / owner / 'entry.py'}:owner") for owner in ("ann", "bob", "ann")]
    assert found == ["ann", "bob", "ann"]


def test_a_file_named_like_a_loaded_or_installed_module_does_not_take_its_place(tmp_path: Path) -> None:
    for name in ("json", "wave", "classifier"):  # loaded, not loaded yet, and nobody's
        file = _write(tmp_path / f"{name}.py", f"name = {name!r}\n")
        assert plugins.import_object(f"{file}:name") == name
    assert sys.modules["json"] is json
    import wave

    assert Path(wave.__file__).parent != tmp_path


def test_neighbours_never_hide_the_standard_library(tmp_path: Path) -> None:
    _write(tmp_path / "json.py", "raise RuntimeError('the wrong json')\n")
    file = _write(tmp_path / "mine.py", "import json\nfound = json\n")
    assert plugins.import_object(f"{file}:found") is json


def test_a_package_of_the_current_folder_is_found_and_the_path_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "acme_nets" / "small.py", "import sys\nsys.path.append('/nowhere')\nanswer = 42\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert plugins.import_object("acme_nets.small:answer") == 42
    assert sys.path == before


def test_a_file_that_empties_the_path_is_no_problem(tmp_path: Path) -> None:
    before = list(sys.path)
    file = _write(tmp_path / "mine.py", "import sys\nsys.path.clear()\nanswer = 42\n")
    assert plugins.import_object(f"{file}:answer") == 42
    assert sys.path == before


def test_a_dotted_name_is_followed_and_a_wrong_one_lists_what_could_be_meant(tmp_path: Path) -> None:
    text = (
        "from json import dumps, JSONDecoder\nimport os\nlimit = 3\n"
        "class Config:\n    class small:\n        answer = 42\n    sizes = ()\n"
        "def build(): pass\n"
    )
    file = _write(tmp_path / "mine.py", text)
    assert plugins.import_object(f"{file}:Config.small.answer") == 42
    with pytest.raises(PluginError, match=r"mine\.py has no 'Confg'; it has Config, build; did you mean Config\?"):
        plugins.import_object(f"{file}:Confg.small")
    with pytest.raises(PluginError, match=r"Config has no 'tiny'; it has small$"):
        plugins.import_object(f"{file}:Config.tiny")


@pytest.mark.parametrize(("init", "imported"), [(True, ".parts"), (False, ".parts"), (True, "..parts")])
def test_relative_imports_find_the_neighbours(init: bool, imported: str, tmp_path: Path) -> None:
    for owner in ("ann", "bob"):
        folder = tmp_path / owner / "nets"
        _write(folder / ("parts.py" if imported == ".parts" else "deep/ignored.py"), f"owner = {owner!r}\n")
        file = _write(folder / "deep" / "entry.py", "") if imported == "..parts" else folder / "entry.py"
        _write(file, f"from {imported} import owner\ndef late():\n    from {imported} import owner\n    return owner\n")
        _write(folder / "parts.py", f"owner = {owner!r}\n")
        for place in {folder, file.parent} if init else ():
            _write(place / "__init__.py", "")
        assert plugins.import_object(f"{file}:owner") == owner
        with plugins.importable(f"{file}:late"):
            assert plugins.import_object(f"{file}:late")() == owner


def test_errors_name_the_innermost_line_of_the_user(tmp_path: Path) -> None:
    _write(tmp_path / "inner_of_mine.py", "import json\n\n\ndef read(text):\n    return json.loads(text)\n")
    file = _write(tmp_path / "mine.py", "from inner_of_mine import read\nread('{')\n")
    with pytest.raises(PluginError, match=r"^\S*inner_of_mine\.py:5: \S*mine\.py: importing it raised JSONDecodeError"):
        plugins.import_object(f"{file}:x")
    file = _write(tmp_path / "other.py", "x = 1\ndef f(:\n")
    with pytest.raises(PluginError, match=r"^\S*other\.py:2: \S*other\.py: importing it raised SyntaxError"):
        plugins.import_object(f"{file}:x")


def test_the_person_at_the_keyboard_is_no_error_of_the_file(tmp_path: Path) -> None:
    before = list(sys.path)
    with pytest.raises(KeyboardInterrupt):
        plugins.import_object(f"{_write(tmp_path / 'interrupted.py', 'raise KeyboardInterrupt')}:x")
    assert sys.path == before and "interrupted" not in sys.modules


def test_a_deleted_current_folder_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(PluginError, match="no_such_package: importing it raised ModuleNotFoundError"):
        plugins.import_object("no_such_package:Net")
