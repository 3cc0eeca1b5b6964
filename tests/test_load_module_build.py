"""Users' modules from end to end: exported, run, compared with their source again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from tx_export import plugins, runtime
from tx_export.artifact import open_graph
from tx_export.compiler import BuildOptions, build, compare
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.metrics import fidelity_bound
from tx_export.verify import Judge

_FEATURES = """
import torch
from torch import nn

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, features, unused=None, *, mask, labels=None):
        x = self.layer(self.project(features), src_key_padding_mask=mask == 0)
        return {"logits": x.mean(1), "aux": None, "n": 3, "mask": mask, "table": self.table}

encoder = Encoder().train()
"""
_INPUTS = ("mask:int64[batch,tokens<=16]", "features:float32[batch,tokens<=16,6]", "unused:int32[batch]")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, list[str]]]:
    """The artifact, its source, and the notices of its making."""
    folder = tmp_path_factory.mktemp("features")
    (folder / "features_of_mine.py").write_text(_FEATURES)
    source = f"{folder / 'features_of_mine.py'}:encoder"
    notices: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: notices.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tx_export").addHandler(handler)
    try:
        build(BuildOptions(source=source, inputs=_INPUTS, quantize="none", output=folder / "artifact"))
    finally:
        logging.getLogger("tx_export").removeHandler(handler)
    yield folder / "artifact", source, notices


def _feeds(dtype: type = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    # Halves of whole numbers are the same in every width.
    features: Any = (rng.integers(-4, 5, (2, 5, 6)) / 2).astype(dtype)
    return {"mask": mask, "features": features, "unused": np.zeros(2, np.int32)}


def test_a_dict_with_other_things_than_tensors_is_built_b225(built: tuple[Path, str, list[str]]) -> None:
    folder, _, notices = built
    model = runtime.Model(folder)
    assert [tensor.name for tensor in model.inputs] == ["mask", "features", "unused"]
    assert [tensor.name for tensor in model.outputs] == ["logits", "mask_out", "table"]
    text = "\n".join(notices)
    assert text.count("dropped, as they are no tensors: aux (None), n (int)") == 1
    assert "'mask_out' is 'mask'" in text and "whatever the inputs hold: 'table'" in text
    assert "inputs that change no output; they are kept, and may be left out: 'unused'" in text
    found = model.run_arrays(_feeds())
    assert np.array_equal(found["mask_out"], _feeds()["mask"]) and found["table"].tolist() == [0, 1, 2]


def test_a_module_in_train_mode_is_built_as_it_evaluates_b080(built: tuple[Path, str, list[str]]) -> None:
    folder, source, _ = built
    model = runtime.Model(folder)
    first, second = (model.run_arrays(_feeds())["logits"] for _ in range(2))
    assert np.array_equal(first, second)
    operators = {node.op_type for node in onnx.load(folder / "model.onnx").graph.node}
    assert not [name for name in operators if "Random" in name or "Dropout" in name]
    # Reference: the user's own module, evaluated.
    theirs = load(source, inputs=_INPUTS).module.get_submodule("module")
    feeds = {name: torch.from_numpy(array) for name, array in _feeds().items()}
    with torch.no_grad():
        expected = theirs(feeds["features"], mask=feeds["mask"])["logits"].numpy()
    assert np.abs(first - expected).max() <= fidelity_bound(float(np.abs(expected).max()))


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_features_of_any_width_are_taken_b221(dtype: type, built: tuple[Path, str, list[str]]) -> None:
    model = runtime.Model(built[0])
    assert np.array_equal(model.run_arrays(_feeds(dtype))["logits"], model.run_arrays(_feeds())["logits"])


def test_an_artifact_of_a_module_is_compared_with_its_source_again(built: tuple[Path, str, list[str]]) -> None:
    folder, source, _ = built
    assert compare(folder, source)["verdict"] == "pass"


_STATEFUL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.utils.weight_norm(nn.Linear(4, 4))
        self.table, self.last, self.log = self.grown(3), None, []
        self.register_buffer("count", torch.zeros(()))
    def grown(self, n):
        return torch.arange(n)[:, None] * torch.tensor([0.1, 0.2, 0.3, 0.4])
    def forward(self, x, scale):
        if x.shape[1] > len(self.table):
            self.table = self.grown(x.shape[1])
        self.count += 1
        x += self.table[: x.shape[1]]
        self.last = self.linear(x) * scale
        self.log.append(self.last)
        return [self.last, self.last, self.last[:, 0], x]

net = Net()
"""


def test_a_module_that_takes_notes_and_grows_its_table_is_exact_at_all_lengths_b042(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_STATEFUL)
    inputs = ["x:float32[batch,tokens<=64,4]", "scale:float64[]{0.5..2}"]
    model = load(f"{tmp_path / 'mine.py'}:net", inputs=inputs)
    run = open_graph(export(model, Target.parse(None, "fused")), plugins.find("provider", "cpu")().session())
    Judge(model).check_exact("export", run)
    # Reference: the user's own object, which keeps what it grows and notes.
    theirs = plugins.import_object(f"{tmp_path / 'mine.py'}:net")
    theirs.load_state_dict(model.module.get_submodule("module").state_dict())
    for tokens in (8, 16, 64):
        x, scale = torch.randn(2, tokens, 4, generator=torch.Generator().manual_seed(tokens)), torch.tensor(1.5)
        found = run({"x": x.numpy(), "scale": scale.double().numpy()})
        with torch.no_grad():
            expected = [tensor.numpy() for tensor in theirs(x.clone(), scale)]
        for name, array in zip(["output_0", "output_1", "output_2", "output_3"], expected, strict=True):
            assert np.abs(found[name] - array).max() <= fidelity_bound(float(np.abs(array).max()))
