"""What an artifact was made from, by its manifest and what is given by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tx_export._sources import origin_of
from tx_export.runtime import UsageError


def manifest(**told: Any) -> dict[str, Any]:
    kept: dict[str, Any] = dict.fromkeys(("pipeline", "min_onnxruntime", "fused", "verification"), "")
    return (
        kept
        | {"config": {}, "inputs": [], "text": None, "task": "text-generation", "weights": "checkpoint 12ab"}
        | told
    )


def test_a_checkpoint_s_folder_may_have_the_name_of_a_built_in_model(tmp_path: Path) -> None:
    folder = str(tmp_path / "lm")
    origin = origin_of(manifest(source="lm"), folder)
    assert (origin.source, origin.task, origin.settings, origin.weights) == (folder, "text-generation", {}, None)


def test_without_one_by_hand_it_is_asked_for_as_a_file_or_a_folder() -> None:
    with pytest.raises(UsageError, match=r"made from lm with checkpoint 12ab; name it with --source, a FILE"):
        origin_of(manifest(source="lm"), None)
