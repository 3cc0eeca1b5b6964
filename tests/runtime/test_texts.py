"""Texts in, results out."""

from __future__ import annotations

from pathlib import Path

from tx_export.runtime import Model

from .artifact import make_artifact


def test_it(tmp_path: Path) -> None:
    model = Model(make_artifact(tmp_path / "a"))
    print(model(["good film", "bad", ("a film", "bad")]))
