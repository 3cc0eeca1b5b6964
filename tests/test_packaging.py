"""What the wheel holds, built once from a copy of the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import tx_export

_ROOT = Path(__file__).resolve().parent.parent
_HOMES = {"tx_export": "tx_export", "tx_export/models": "models", "tx_export/quantize": "quantize"}
_CARRIED = (".py", ".safetensors", ".json", ".txt", ".typed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(_ROOT / name, copy / name)
    for folder in _HOMES.values():
        shutil.copytree(_ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(copy / "dist")], cwd=copy, check=True, capture_output=True)
    (built,) = (copy / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


def _sources() -> set[str]:
    """Every file that the package needs, by its place in the wheel."""
    found = set()
    for place, folder in _HOMES.items():
        for path in (_ROOT / folder).rglob("*"):
            inner = path.relative_to(_ROOT / folder)
            if path.suffix in _CARRIED and not (folder == "tx_export" and inner.parts[0] in ("models", "quantize")):
                found.add(f"{place}/{inner.as_posix()}")
    return found


def test_the_wheel_holds_every_module_weight_and_text_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == _sources()
    assert {"tx_export/py.typed", "tx_export/models/classifier.py", "tx_export/quantize/__init__.py"} <= packaged
    assert len(names) == len(set(names))


def test_the_wheel_names_its_version_licence_and_command(wheel: zipfile.ZipFile) -> None:
    record = f"tx_export-{tx_export.__version__}.dist-info"
    metadata = wheel.read(f"{record}/METADATA").decode()
    assert f"Version: {tx_export.__version__}\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert f"{record}/licenses/LICENSE" in wheel.namelist()
    assert "tx-export = tx_export.cli:main" in wheel.read(f"{record}/entry_points.txt").decode()


def _required() -> list[str]:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(item for extra in project["optional-dependencies"].values() for item in extra)]


def test_torch_is_pinned_in_one_place() -> None:
    (pin,) = [item for item in _required() if item.startswith("torch") and not item.startswith("torchvision")]
    assert pin.startswith("torch==")
    for name in ("Makefile", ".ci/run", "README.md"):
        assert pin.removeprefix("torch==") not in (_ROOT / name).read_text(encoding="utf-8")


def test_every_other_dependency_has_a_lower_and_an_upper_bound() -> None:
    assert not [item for item in _required() if "==" not in item and not (">=" in item and "<" in item)]
