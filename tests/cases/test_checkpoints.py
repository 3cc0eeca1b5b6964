"""Checkpoint loading and honest comparison."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tx_export import cli
from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.runtime import Model, read_manifest, self_test
from tx_export.testing import tiny_classifier
from tx_export.verify import Step, compare

from .models import CLS

Array = NDArray[Any]
State = dict[str, Tensor]


@pytest.fixture
def checkpoint(hf_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(hf_checkpoint, tmp_path / "checkpoint")


def _edit(file: Path, change: Callable[[State], State]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file)


def _built(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int | str | None, str]:
    """Exit code and last line on stderr of a build."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["build", *arguments])
    return ended.value.code, capsys.readouterr().err.splitlines()[-1]


_FLAWS: dict[str, tuple[Callable[[State], State], str]] = {
    "b255 without a weight": (
        lambda state: {name: tensor for name, tensor in state.items() if name != "classifier.weight"},
        "1 missing: classifier.weight; nothing unexpected",
    ),
    "b255 under another prefix": (
        lambda state: {f"net.{name}": tensor for name, tensor in state.items()},
        "would fit without net. in front",
    ),
    "b257 with five rows": (
        lambda state: state | {"classifier.weight": torch.zeros(5, 96), "classifier.bias": torch.zeros(5)},
        "classifier.bias has shape [5], but its config asks for [3]",
    ),
}


@pytest.mark.parametrize("flaw", _FLAWS)
def test_b255_b257_weights_that_do_not_fit_are_named_and_nothing_is_built(
    flaw: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To go on all the same takes --weights random."""
    change, message = _FLAWS[flaw]
    _edit(checkpoint / "model.safetensors", change)
    code, error = _built([str(checkpoint), "-o", str(tmp_path / "artifact")], capsys)
    assert code == 1 and error.startswith("error: ") and message in error
    assert not (tmp_path / "artifact").exists()
    assert load(str(checkpoint), weights="random").weights == "random seed 0"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_forward_module.module."])
def test_b256_a_state_file_of_ours_with_prefixes_gives_equal_weights(
    prefix: str, cls_weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _assert_loads_equal(cls_weights, tmp_path, lambda name: f"{prefix}{name}")
    assert f"the prefix {prefix} was taken off" in caplog.text


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"])
def test_b256_wrappers_of_single_layers_are_taken_off_too(wrapper: str, cls_weights: Path, tmp_path: Path) -> None:
    _assert_loads_equal(cls_weights, tmp_path, lambda name: name.replace("layers.0.", f"layers.0.{wrapper}."))


def _assert_loads_equal(weights: Path, folder: Path, rename: Callable[[str], str]) -> None:
    config = json.dumps(dataclasses.asdict(CLS))
    state = {rename(name): tensor for name, tensor in load_file(weights).items()}
    assert state.keys() != load_file(weights).keys()
    save_file(state, folder / "renamed.safetensors", {"config": config})
    found, expected = (
        load("classifier", weights=str(file)).module.state_dict() for file in (folder / "renamed.safetensors", weights)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_b256_two_tensors_that_become_one_are_refused(cls_weights: Path, tmp_path: Path) -> None:
    state = load_file(cls_weights)
    save_file(state | {"module.head.bias": state["head.bias"].clone()}, tmp_path / "twice.safetensors")
    with pytest.raises(LoadError, match=r"two tensors are both head\.bias without the prefix module\."):
        load("classifier", weights=str(tmp_path / "twice.safetensors"), settings={"labels": "bad,plain,good"})


_WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "too large for float32": (lambda tensor: tensor.double() + 1e300, "holds 288 of 288 values that are NaN or inf"),
    "float8": (lambda tensor: tensor.to(torch.float8_e4m3fn), "classifier.weight is float8_e4m3fn; supported: float32"),
    "complex": (lambda tensor: tensor.to(torch.complex64), "classifier.weight is complex64; supported: float32"),
    "bool": (lambda tensor: tensor > 0, "classifier.weight is bool; supported: float32"),
}


@pytest.mark.parametrize("kind", _WRONG)
def test_numbers_that_float32_does_not_hold_are_refused_by_name(kind: str, checkpoint: Path) -> None:
    change, message = _WRONG[kind]
    _edit(
        checkpoint / "model.safetensors",
        lambda state: state | {"classifier.weight": change(state["classifier.weight"])},
    )
    with pytest.raises(LoadError, match=message):
        load(str(checkpoint))


@pytest.mark.parametrize("shards", ["safetensors", "bin"])
def test_shards_give_the_weights_of_the_whole_and_a_missing_one_is_named(shards: str, checkpoint: Path) -> None:
    """As transformers cuts them."""
    expected = load(str(checkpoint)).module.state_dict()
    state = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    stem = "model" if shards == "safetensors" else "pytorch_model"
    files = [f"{stem}-0000{number}-of-00002.{shards}" for number in (1, 2)]
    weight_map = {name: files[place % 2] for place, name in enumerate(state)}
    for file in files:
        part = {name: state[name] for name in state if weight_map[name] == file}
        save_file(part, checkpoint / file) if shards == "safetensors" else torch.save(part, checkpoint / file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (checkpoint / f"{stem}.{shards}.index.json").write_text(json.dumps(index))
    found = load(str(checkpoint)).module.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (checkpoint / files[1]).unlink()
    with pytest.raises(LoadError, match=f"{files[1]}: no such file"):
        load(str(checkpoint))


_NOT_WEIGHTS: dict[str, tuple[str, bytes, str]] = {
    "a pointer of Git LFS": (
        "model.safetensors",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "model.safetensors: a pointer of Git LFS, not the weights; git lfs pull brings them",
    ),
    "a pointer for a pickle": (
        "pytorch_model.bin",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "pytorch_model.bin: a pointer of Git LFS",
    ),
    "of another framework": ("tf_model.h5", b"", "no weights; expected .*; tf_model.h5 is not one of them"),
    "a page of an error": ("model.safetensors", b"<html>404</html>", "a damaged or truncated safetensors file"),
    "a header that lies about its length": (
        "model.safetensors",
        (9).to_bytes(8, "little") + b'{"a": {"dtype": "F32"}}',
        "a damaged or truncated safetensors file",
    ),
    "a header that lies about a shape": (
        "model.safetensors",
        (64).to_bytes(8, "little")
        + json.dumps({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}).ljust(64).encode()
        + bytes(4),
        "a damaged or truncated safetensors file",
    ),
    "a header that reads past the end": (
        "model.safetensors",
        (72).to_bytes(8, "little")
        + json.dumps({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}).ljust(72).encode()
        + bytes(4),
        "a damaged or truncated safetensors file",
    ),
}


@pytest.mark.parametrize("kind", _NOT_WEIGHTS)
def test_a_file_that_holds_no_weights_is_named_with_what_it_is(kind: str, checkpoint: Path) -> None:
    name, content, message = _NOT_WEIGHTS[kind]
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(content)
    with pytest.raises(LoadError, match=message):
        load(str(checkpoint))


_BROKEN: dict[str, tuple[float, float]] = {
    "NaN on both sides": (math.nan, math.nan),
    "NaN where eager is finite": (math.nan, 1.0),
    "infinity on both sides": (math.inf, math.inf),
}


@pytest.mark.parametrize("kind", _BROKEN)
def test_b259_what_is_not_finite_never_compares_as_equal_and_is_counted_for_both_sides(kind: str) -> None:
    """Stand-ins: the eager module, and a runner that gives what it gives, each with its own value in one place."""
    ours, theirs = _BROKEN[kind]
    model = tiny_classifier()
    eager = model.module.forward

    def spoilt(value: float) -> Callable[..., Tensor]:
        def forward(*inputs: Tensor) -> Tensor:
            logits: Tensor = eager(*inputs)
            logits[0, 0] = logits[0, 0] if value == 1.0 else value
            return logits

        return forward

    def runner(feeds: Mapping[str, Array]) -> dict[str, Array]:
        with torch.no_grad():
            inputs = (torch.from_numpy(feeds[spec.name]) for spec in model.inputs)
            return {"logits": spoilt(ours)(*inputs).numpy()}

    model.module.forward = spoilt(theirs)
    found = compare(model, [Step("artifact", runner)])
    report = found.to_json()
    assert report["verdict"] == "fail"
    both = 2 if theirs != 1.0 else 1
    assert report["outputs"]["logits"]["non_finite"] == both * len(report["cases"])
    assert all(case["non_finite"] == both and case["max_abs"] is None for case in report["cases"])
    assert found.failure is not None and "non-finite values (eager " in found.failure


def test_b259_the_self_test_of_a_checkpoint_is_as_strict_as_that_of_ours(hf_artifact: Path) -> None:
    """Rows for which Hugging Face promises nothing are left out; else they would set the limit."""
    assert read_manifest(hf_artifact)["verification"]["self_test"]["sqnr_db"] == 60.0
    assert self_test(Model(hf_artifact, threads=1))["agrees"]


_FOREIGN = """
import torch
from torch import nn


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return torch.from_numpy(2 * x.numpy())

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient


@torch.library.custom_op("mine::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)


class Inner(nn.Module):
    def forward(self, x):
        return CALL(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x)
"""


@pytest.mark.parametrize(
    ("call", "line", "operation"),
    [
        ("Doubled.apply", "return torch.from_numpy", "numpy"),
        ("doubled", "return doubled(x)", "has no ONNX operators"),
    ],
)
def test_b261_an_operation_that_can_not_be_exported_is_named_with_module_file_and_line(
    call: str, line: str, operation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _FOREIGN.replace("CALL", call).replace("mine::", f"mine_{call[:3]}::")
    file = tmp_path / "foreign.py"
    file.write_text(text)
    number = 1 + text[: text.index(line)].count("\n")
    given = [f"{file}:Outer", "--input", "x:float32[rows,4]", "-o", str(tmp_path / "artifact")]
    code, error = _built(given, capsys)
    assert code == 1 and error.startswith("error: ")
    assert f"{file}:{number}: in inner: " in error
    assert operation in error
    assert Path(error.rpartition("the exporter's own words: ")[2].rstrip(")")).stat().st_size > 1000
    assert not (tmp_path / "artifact").exists()
