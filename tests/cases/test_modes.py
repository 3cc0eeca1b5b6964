"""Cases of mode and activation: a module in training mode, and which GELU is computed."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from tx_export.artifact import open_graph
from tx_export.compiler import BuildOptions, build
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.metrics import fidelity_bound
from tx_export.optimize.fold_constants import FoldConstants
from tx_export.optimize.fuse_bias_gelu import FuseBiasGelu
from tx_export.optimize.fuse_gelu import FuseGelu
from tx_export.providers.cpu import Cpu
from tx_export.runtime import Model, read_manifest
from tx_export.testing import eager_model

_RANDOM = {"Dropout", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli"}
_USER = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 16)
        self.drop = nn.Dropout(0.5)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.frozen = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 3)).eval()

    def forward(self, x):
        return self.frozen(self.drop(self.encoder(self.up(x)))[:, 0])

torch.manual_seed(0)
net = Net()
net.train()
net.frozen.eval()
"""


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[nn.Module, dict[str, Tensor], Path]]:
    """A user's module, left in training mode with a part in eval mode; its weights before the build; the artifact."""
    folder = tmp_path_factory.mktemp("modes")
    (folder / "b080_of_a_user.py").write_text(_USER, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        net: nn.Module = importlib.import_module("b080_of_a_user").net
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        build(
            BuildOptions(
                source="b080_of_a_user:net", inputs=("x:float32[batch,tokens,4]",), quantize="none",
                output=folder / "a",
            )
        )  # fmt: skip
        yield net, before, folder / "a"
    sys.modules.pop("b080_of_a_user", None)


def test_b080_a_module_in_training_mode_is_built_in_eval_mode(
    users: tuple[nn.Module, dict[str, Tensor], Path],
) -> None:
    net, _, folder = users
    graph = ir.load(folder / "model.onnx").graph
    assert not _RANDOM & {node.op_type for node in graph.all_nodes()}
    x = np.random.default_rng(1).normal(size=(3, 7, 4)).astype(np.float32)
    opened = Model(folder, threads=1)
    first, second = (opened.run_arrays({"x": x})["output_0"] for _ in range(2))
    assert np.array_equal(first, second)
    modes = {name: part.training for name, part in net.named_modules()}
    with torch.no_grad():
        expected = net.eval()(torch.from_numpy(x)).numpy()
    for name, part in net.named_modules():
        part.training = modes[name]
    assert np.abs(first - expected).max() <= fidelity_bound(float(np.abs(expected).max()))


def test_b080_the_users_module_keeps_its_modes_and_weights(users: tuple[nn.Module, dict[str, Tensor], Path]) -> None:
    net, before, _ = users
    assert net.training and net.get_submodule("encoder.layers.1.dropout").training
    assert not net.get_submodule("frozen").training and not net.get_submodule("frozen.0").training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_b080_our_own_model_has_no_dropout_left_either(cls_artifact: Path, cls_weights: Path) -> None:
    assert not _RANDOM & {node.op_type for node in ir.load(cls_artifact / "model.onnx").graph.all_nodes()}
    module = load("classifier", weights=str(cls_weights)).module
    assert not any(part.training for part in module.modules())


class _Block(nn.Module):
    """A feed-forward block with a residual, in a stack so deep that the forms of the GELU drift apart."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(16, 64), activation, nn.Linear(64, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.down(self.activation(self.up(x))))
        return out


def _stack(form: str, layers: int = 12) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blocks = nn.Sequential(*(_Block(nn.GELU(approximate=form)) for _ in range(layers))).eval()
    with torch.no_grad():
        for block in blocks:
            block.up.weight *= 4  # type: ignore[operator, union-attr]  # so that values reach where the forms differ
    return blocks


_X = np.random.default_rng(1).normal(size=(2, 9, 16)).astype(np.float32)


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_b084_twelve_layers_keep_the_form_of_their_gelu_optimized_or_not(form: str) -> None:
    module, other = _stack(form), _stack("tanh" if form == "none" else "none")
    with torch.no_grad():
        expected, wrong = (each(torch.from_numpy(_X)).numpy() for each in (module, other))
    bound = fidelity_bound(float(np.abs(expected).max()))
    assert np.abs(expected - wrong).max() > 5 * bound  # so the other form would show
    model = eager_model(module, ["x:float32[batch,tokens,16]"], ["y:float32[batch,tokens,16]"])
    graph = export(model, Target.parse(None, "fused"))
    for passes in ((), (FoldConstants(), FuseGelu(), FuseBiasGelu())):
        for item in passes:
            item(graph)
        found = open_graph(graph, Cpu().session(), threads=1)({"x": _X})["y"]
        assert np.abs(found - expected).max() <= bound


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_b084_a_single_gelu_is_the_form_that_it_claims(form: str) -> None:
    model = eager_model(nn.GELU(approximate=form), ["x:float32[n]"], ["y:float32[n]"])
    graph = export(model, Target.parse(None, "fused"))
    x = np.linspace(-6, 6, 4001).astype(np.float32)
    # Reference: the two formulas (Hendrycks and Gimpel 2016) in float64.
    wide = x.astype(np.float64)
    inner = [math.erf(value / math.sqrt(2)) for value in wide]
    if form == "tanh":
        inner = list(np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    expected = 0.5 * wide * (1 + np.array(inner))
    for passes in ((), (FoldConstants(), FuseGelu())):
        for item in passes:
            item(graph)
        found = open_graph(graph, Cpu().session(), threads=1)({"x": x})["y"]
        assert np.abs(found - expected).max() <= 1e-6  # the case's bound
    # The tanh form stays in plain operators; the fused operator of the exact form must not take its place.
    assert [node.op_type for node in graph.graph if "Gelu" in node.op_type] == (["Gelu"] if form == "none" else [])


def test_b084_an_approximate_form_is_only_where_the_module_has_it(cls_artifact: Path) -> None:
    nodes = {node.op_type for node in ir.load(cls_artifact / "model.onnx").graph.all_nodes()}
    assert "Gelu" in nodes and not nodes & {"FastGelu", "QuickGelu"}
    assert "approximate" not in read_manifest(cls_artifact)["pipeline"]
