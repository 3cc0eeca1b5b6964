"""Weights, sharing and external data."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tx_export import runtime
from tx_export.errors import ArtifactError
from tx_export.metrics import fidelity_bound
from tx_export.runtime import Model, read_manifest

from .models import build_from, hf_config, save_hf

Array = NDArray[Any]

_IDS = np.random.default_rng(1).integers(5, 1000, (3, 17))
_MASK = (np.arange(17) < np.array([[17], [9], [2]])).astype(np.int64)
_FEEDS = {"input_ids": _IDS, "attention_mask": _MASK}


def _data_entries(folder: Path) -> list[dict[str, str]]:
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    tensors = [tensor for tensor in proto.graph.initializer if tensor.external_data]
    return [{entry.key: entry.value for entry in tensor.external_data} for tensor in tensors]


@pytest.mark.parametrize(("quantize", "most"), [("none", 14_000_000), ("dynamic_int8", 3_700_000)])
def test_b050_a_tied_table_is_stored_once(quantize: str, most: int, tmp_path: Path) -> None:
    """Against transformers. The table has 12.29 MB in fp32 and 3.07 MB in int8; two copies break the limit."""
    import transformers

    checkpoint = save_hf(tmp_path / "mlm", "BertForMaskedLM", vocab_size=32_000, max_position_embeddings=17)
    (checkpoint / "tokenizer.json").unlink()  # of another vocabulary
    folder = build_from(checkpoint, tmp_path / "artifact", quantize)
    assert sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".onnx", ".data")) <= most
    if quantize == "none":
        eager = transformers.BertForMaskedLM.from_pretrained(checkpoint)
        with torch.no_grad():
            expected = eager(**{name: torch.from_numpy(array) for name, array in _FEEDS.items()}).logits.numpy()
        found = Model(folder, threads=1).run_arrays(_FEEDS)["logits"]
        real = _MASK != 0
        assert np.abs(found - expected)[real].max() <= fidelity_bound(float(np.abs(expected[real]).max()))


def test_b060_the_file_is_as_large_as_the_parameters(
    cls_artifact: Path, cls_weights: Path, hf_artifact: Path, hf_checkpoint: Path
) -> None:
    """Encoders hold nothing twice; 15% on top are for the graph itself and its small constants."""
    for folder, weights in ((cls_artifact, cls_weights), (hf_artifact, hf_checkpoint / "model.safetensors")):
        parameters = sum(tensor.nbytes for tensor in load_file(weights).values())
        assert read_manifest(folder)["files"]["model.onnx"]["bytes"] <= 1.15 * parameters


@pytest.mark.usefixtures("weights_outside")
def test_b052_a_data_file_does_not_grow_on_rebuild(cls_outside: Path, cls_weights: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(cls_outside, tmp_path / "again")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for _ in range(2):
        build_from(cls_weights, folder, force=True)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_b052_every_byte_of_a_data_file_belongs_to_a_tensor(cls_outside: Path) -> None:
    spans = sorted((int(entry["offset"]), int(entry["length"])) for entry in _data_entries(cls_outside))
    end = 0
    for offset, length in spans:
        assert end <= offset < end + 64 * 1024  # a page of alignment at most
        end = offset + length
    assert len(spans) > 10
    assert (cls_outside / "model.onnx.data").stat().st_size == end


def test_b053_an_artifact_with_a_data_file_may_be_moved_and_run_from_anywhere(
    cls_outside: Path, cls_artifact: Path, tmp_path: Path
) -> None:
    """Against the artifact whose weights stand in its graph."""
    folder = shutil.copytree(cls_outside, tmp_path / "moved")
    assert {entry["location"] for entry in _data_entries(folder)} == {"model.onnx.data"}
    expected = Model(cls_artifact, threads=1).run_arrays(_FEEDS)["logits"]
    assert np.array_equal(Model(folder, threads=1).run_arrays(_FEEDS)["logits"], expected)
    for start, program in (("/", folder / "run.py"), (tmp_path, Path("moved/run.py"))):
        done = subprocess.run(
            [sys.executable, str(program), "hello", "--json"], cwd=start, capture_output=True, text=True, check=True
        )
        assert done.stdout.count("\n") == 1 and '"label"' in done.stdout
    for path in folder.iterdir():
        assert str(cls_outside.parent).encode() not in path.read_bytes()


_DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "deleted": (lambda data, other: data.unlink(), "missing"),
    "renamed": (lambda data, other: data.rename(data.with_name("weights.data")), "missing"),
    "of another build": (shutil.copyfile, "has {found} bytes where the manifest says {listed}"),
    "of as many bytes": (lambda data, other: data.write_bytes(bytes(data.stat().st_size)), "damaged or changed"),
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_b054_a_data_file_that_is_missing_or_another_is_named(damage: str, cls_outside: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(cls_outside, tmp_path / "damaged")
    data, other = folder / "model.onnx.data", tmp_path / "other.data"
    listed = data.stat().st_size
    other.write_bytes(data.read_bytes()[:5000])
    change, message = _DAMAGES[damage]
    change(other, data) if damage == "of another build" else change(data, other)
    with pytest.raises(ArtifactError, match=f"model.onnx.data: {message.format(found=5000, listed=listed)}"):
        Model(folder)
    done = subprocess.run([sys.executable, folder / "run.py", "x"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: ") and "model.onnx.data" in done.stderr


@pytest.mark.usefixtures("weights_outside")
def test_b055_every_pass_works_on_a_graph_with_a_data_file(cls_weights: Path, cls_int8: Path, tmp_path: Path) -> None:
    """Each pass is held to its own tolerance by the build; int8 gives what it gives without a data file."""
    fused = "fold_constants fuse_gelu pack_qkv fuse_bias_gelu fuse_residual_norm"
    folder = build_from(cls_weights, tmp_path / "all", quantize=None, passes=f"{fused} dynamic_int8")
    manifest = read_manifest(folder)
    assert manifest["verification"]["passes"][0]["pass"] == "export"
    assert manifest["quantized"]["done"] > 0
    assert "model.onnx.data" in manifest["files"]
    found, expected = (Model(each, threads=1).run_arrays(_FEEDS)["logits"] for each in (folder, cls_int8))
    assert np.abs(found - expected).max() <= fidelity_bound(float(np.abs(expected).max()))


def test_b057_an_artifact_of_symlinks_out_of_its_folder_says_how_to_make_files_of_them(
    cls_outside: Path, tmp_path: Path
) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "linked").mkdir()
    for number, file in enumerate(sorted(cls_outside.iterdir())):
        (tmp_path / "blobs" / str(number)).write_bytes(file.read_bytes())
        (tmp_path / "linked" / file.name).symlink_to(f"../blobs/{number}")
    with pytest.raises(ArtifactError, match=r"'model\.onnx' lies outside .*it is a symlink; cp -rL"):
        Model(tmp_path / "linked")
    shutil.copytree(tmp_path / "linked", tmp_path / "plain")  # follows links, as cp -rL does
    assert runtime.self_test(Model(tmp_path / "plain"))["agrees"]


@pytest.mark.nightly
@pytest.mark.parametrize("passes", ["fold_constants fuse_gelu pack_qkv", "fold_constants dynamic_int8"])
def test_b055_a_checkpoint_over_2_gb_is_built_moved_and_run(passes: str, tmp_path: Path) -> None:
    """A table of 250,000 x 2304 in fp32 is 2.3 GB, more than a protobuf message holds; needs 10 GB of memory.

    The build itself holds each pass to eager; the self-test holds the moved folder to it once more.
    """
    import transformers

    checkpoint, built, moved = (tmp_path / name for name in ("checkpoint", "built", "moved"))
    config = hf_config(
        "BertForSequenceClassification", vocab_size=250_000, hidden_size=2304, num_attention_heads=24,
        num_hidden_layers=1, intermediate_size=2304, max_position_embeddings=32,
    )  # fmt: skip
    config.save_pretrained(checkpoint)
    with torch.device("meta"):
        shapes = transformers.BertForSequenceClassification(config).state_dict()
    try:
        generator = torch.Generator().manual_seed(0)
        state = {
            name: torch.empty(tensor.shape).normal_(float(name.endswith("LayerNorm.weight")), 0.02, generator=generator)
            for name, tensor in shapes.items()
            if tensor.is_floating_point()
        }
        save_file(state, checkpoint / "model.safetensors")
        del state
        build_from(checkpoint, built, quantize=None, passes=passes)
        built.rename(moved)
        shutil.rmtree(checkpoint)
        files = read_manifest(moved)["files"]
        assert ("model.onnx.data" in files) == ("int8" not in passes)
        assert {entry["location"] for entry in _data_entries(moved)} <= {"model.onnx.data"}
        done = subprocess.run(
            [sys.executable, str(moved / "run.py"), "--self-test"], cwd="/", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        for folder in (checkpoint, built, moved):
            shutil.rmtree(folder, ignore_errors=True)
