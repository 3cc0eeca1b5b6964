"""Artifacts and checkpoints that the cases share: read only, each made once for all workers of pytest-xdist."""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tx_export import artifact

from .models import build_from, save_cls, save_hf

Once = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """`once(name, make)` is the folder that `make(folder)` filled the first time that any worker asked for the name."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make_once(name: str, make: Callable[[Path], object]) -> Path:
        folder = shared / name
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                make(folder)
        return folder

    return make_once


@pytest.fixture(scope="session")
def cls_weights(once: Once) -> Path:
    """The weight file of the classifier, with a tokenizer beside it."""
    return once("cls-weights", save_cls) / "model.safetensors"


@pytest.fixture(scope="session")
def cls_artifact(once: Once, cls_weights: Path) -> Path:
    """The classifier in fp32."""
    return once("cls-fp32", lambda folder: build_from(cls_weights, folder))


@pytest.fixture(scope="session")
def cls_int8(once: Once, cls_weights: Path) -> Path:
    """The classifier as dynamic_int8."""
    return once("cls-int8", lambda folder: build_from(cls_weights, folder, "dynamic_int8"))


@pytest.fixture(scope="session")
def hf_checkpoint(once: Once) -> Path:
    """A BERT with 3 labels, as transformers saves it, with a tokenizer."""
    return once("hf-checkpoint", save_hf)


@pytest.fixture(scope="session")
def hf_artifact(once: Once, hf_checkpoint: Path) -> Path:
    """That BERT in fp32."""
    return once("hf-fp32", lambda folder: build_from(hf_checkpoint, folder))


def _outside(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(artifact, "write_graph", functools.partial(artifact.write_graph, inline_bytes=1000))


@pytest.fixture
def weights_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs with more than 1 kB of weights are written with a data file, as those over 2 GB are."""
    _outside(monkeypatch)


@pytest.fixture(scope="session")
def cls_outside(once: Once, cls_weights: Path) -> Path:
    """The classifier in fp32 with its weights in a data file."""

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            _outside(patch)
            build_from(cls_weights, folder)

    return once("cls-outside", make)
