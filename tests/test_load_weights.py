"""Weights of checkpoints: what is widened, stripped, refused and hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tx_export.errors import LoadError
from tx_export.load import load
from tx_export.spec import EagerModel
from tx_export.testing import tiny_bert_folder


def _state(model: EagerModel) -> dict[str, Tensor]:
    return dict(model.module.state_dict())


def _assert_same_weights(first: EagerModel, second: EagerModel) -> None:
    ours, theirs = _state(first), _state(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def _edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file)


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    return tiny_bert_folder(tmp_path / "bert", "BertForSequenceClassification")


def test_b057_a_checkpoint_of_symlinks_into_blobs_loads(classifier: Path, tmp_path: Path) -> None:
    """B057."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for index, file in enumerate(sorted(classifier.iterdir())):
        (tmp_path / "blobs" / f"{index}").write_bytes(file.read_bytes())
        (tmp_path / "snapshot" / file.name).symlink_to(Path("..") / "blobs" / f"{index}")
    linked, plain = load(str(tmp_path / "snapshot")), load(str(classifier))
    _assert_same_weights(linked, plain)
    assert linked.weights == plain.weights


def test_b057_a_symlink_to_nothing_is_named(classifier: Path) -> None:
    """B057."""
    (classifier / "model.safetensors").unlink()
    (classifier / "model.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(LoadError, match=r"model.safetensors: a symlink to a file that is not there"):
        load(str(classifier))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_b105_half_precision_weights_are_widened_with_a_notice(
    dtype: torch.dtype, classifier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B105: exactly the widened values."""
    before = _state(load(str(classifier)))
    _edit_weights(classifier, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    caplog.clear()
    after = _state(load(str(classifier)))
    assert "is widened to float32" in caplog.text
    assert all(after[name].dtype == torch.float32 for name in after)
    assert all(torch.equal(after[name], before[name].to(dtype).float()) for name in before)


@pytest.mark.parametrize(("value", "count"), [(float("nan"), 1), (float("inf"), 2)])
def test_b129_a_weight_that_is_not_finite_is_named_and_counted(value: float, count: int, classifier: Path) -> None:
    """B129."""

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["bert.encoder.layer.1.output.dense.weight"].view(-1)[:count] = value
        return tensors

    _edit_weights(classifier, spoil)
    with pytest.raises(LoadError, match=f"bert.encoder.layer.1.output.dense.weight holds {count} of 512 values"):
        load(str(classifier))


def test_b255_a_missing_weight_is_named(classifier: Path) -> None:
    """B255."""
    _edit_weights(classifier, lambda tensors: {n: t for n, t in tensors.items() if n != "classifier.weight"})
    with pytest.raises(LoadError, match=r"1 missing: classifier.weight; nothing unexpected"):
        load(str(classifier))


def test_b255_names_under_another_prefix_are_listed_first_ten_and_counted(classifier: Path) -> None:
    """B255."""
    _edit_weights(classifier, lambda tensors: {f"net.{name}": tensor for name, tensor in tensors.items()})
    with pytest.raises(LoadError, match=r"missing: .*, \.\.\.; \d\d unexpected: net\..*, \.\.\.; ") as caught:
        load(str(classifier))
    listed, _, hint = str(caught.value).rpartition("; ")
    assert listed.count("net.") == 10
    assert hint == "they would fit without net. in front: save the weights of that part alone"


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "_forward_module.", "_fsdp_wrapped_module."],
)
def test_b256_prefixes_are_taken_off_with_a_notice(
    prefix: str, classifier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B256."""
    before = load(str(classifier))
    _edit_weights(classifier, lambda tensors: {f"{prefix}{name}": tensor for name, tensor in tensors.items()})
    caplog.clear()
    _assert_same_weights(load(str(classifier)), before)
    assert f"the prefix {prefix} was taken off" in caplog.text


def test_b257_a_shape_that_does_not_fit_is_named_with_both_shapes(classifier: Path) -> None:
    """B257."""
    _edit_weights(classifier, lambda tensors: tensors | {"classifier.weight": torch.zeros(5, 16)})
    with pytest.raises(LoadError, match=r"classifier.weight has shape \[5, 16\], but its config asks for \[3, 16\]"):
        load(str(classifier))


def test_weights_that_are_no_floats_are_refused(classifier: Path) -> None:
    change = {"classifier.weight": torch.zeros(3, 16, dtype=torch.int8)}
    _edit_weights(classifier, lambda tensors: tensors | change)
    with pytest.raises(LoadError, match=r"classifier.weight is int8; supported: float32"):
        load(str(classifier))


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    folder = tiny_bert_folder(tmp_path / "mlm", "BertForMaskedLM")
    load(str(folder))
    _edit_weights(folder, lambda tensors: tensors | {"cls.predictions.decoder.weight": torch.ones(128, 16)})
    with pytest.raises(LoadError, match="are one tensor in this model, but differ"):
        load(str(folder))


def test_a_folder_without_weights_says_what_it_looked_for(classifier: Path) -> None:
    (classifier / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"no weights; expected model.safetensors or pytorch_model.bin"):
        load(str(classifier))


def test_random_weights_by_hand_need_no_weight_file(classifier: Path) -> None:
    (classifier / "model.safetensors").unlink()
    first, second = (load(str(classifier), weights="random:2") for _ in range(2))
    _assert_same_weights(first, second)
    assert first.weights == "random seed 2"


def test_the_hash_of_the_weights_is_that_of_the_file(classifier: Path) -> None:
    digest = hashlib.sha256((classifier / "model.safetensors").read_bytes()).hexdigest()
    assert load(str(classifier)).weights == f"checkpoint {digest}"


def test_b256_a_module_that_has_a_part_called_module_keeps_its_names(tmp_path: Path) -> None:
    """B256."""
    (tmp_path / "wrapped.py").write_text(
        "from torch import nn\nclass Wrapped(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.module = nn.Linear(2, 2)\n"
        "    def forward(self, x):\n        return self.module(x)\n"
    )
    weights = {"module.weight": torch.full((2, 2), 3.0), "module.bias": torch.zeros(2)}
    save_file(weights, tmp_path / "w.safetensors")
    source, inputs = f"{tmp_path / 'wrapped.py'}:Wrapped", ["x:float32[rows,2]"]
    model = load(source, inputs=inputs, weights=str(tmp_path / "w.safetensors"))
    assert torch.equal(_of_part(model), weights["module.weight"])
    save_file({f"module.{name}": tensor for name, tensor in weights.items()}, tmp_path / "w.safetensors")
    model = load(source, inputs=inputs, weights=str(tmp_path / "w.safetensors"))
    assert torch.equal(_of_part(model), weights["module.weight"])


def _of_part(model: EagerModel) -> Tensor:
    return next(tensor for name, tensor in _state(model).items() if name.endswith("module.weight"))


@pytest.mark.parametrize("source", [None, "bert"])
def test_a_weight_file_that_is_not_there_is_named(source: str | None, classifier: Path) -> None:
    with pytest.raises(LoadError, match=r"gone.safetensors: no such file"):
        load(source and str(classifier), weights="gone.safetensors")
