"""Export: names, dimensions and operators of the graph, that it computes what eager does, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tx_export.errors import ExportError
from tx_export.export import Target, export, least_onnxruntime
from tx_export.metrics import fidelity_bound
from tx_export.models.parts.attention import MultiHeadAttention
from tx_export.models.parts.masks import key_mask
from tx_export.optimize.fold_constants import FoldConstants
from tx_export.spec import EagerModel
from tx_export.testing import eager_model, graph_from_text, run_graph, tiny_classifier, tiny_embedder

_LAYERS, _LONGEST = 2, 32  # of the tiny models
_ATTENTION = "com.microsoft::MultiHeadAttention"


class _Traps(nn.Module):
    """Inner values and weights are named as other inputs and outputs; two outputs are an input and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(6, 8))
        self.logits = nn.Linear(8, 8)
        self.first = nn.Parameter(torch.randn(3))
        self.dropout = nn.Dropout(0.5)
        self.attention = MultiHeadAttention(8, 3, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
        embedding = self.embedding[input_ids]
        logits = self.dropout(self.logits(embedding))
        x = self.attention(logits, logits, key_mask(attention_mask, logits.dtype), causal=True)
        return x, logits, scores, x, self.first


class _Branches(nn.Module):
    """Takes another way where nothing is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * 2 if mask.all() else x * mask


def _traps() -> EagerModel:
    torch.manual_seed(0)
    return eager_model(
        _Traps(),
        [
            "ids:int64[batch<=4,tokens<=9]{0..5}",
            "attention_mask:int64[batch,tokens]",
            "embedding:float32[one<=1,batch]",
        ],
        [
            "logits:float32[batch,tokens,8]",
            "input_ids:float32[batch,tokens,8]",
            "first:float32[one,batch]",
            "last:float32[batch,tokens,8]",
            "linear:float32[3]",
        ],
    )


_MODELS: dict[str, Callable[[], EagerModel]] = {
    "classifier": tiny_classifier,
    "embedder": tiny_embedder,
    "traps": _traps,
}
# Model, --target-ort and --ops. An export costs seconds: each of these is made once, when it is first wanted.
_ASKED: dict[str, tuple[str, str | None, Literal["fused", "standard"]]] = {
    "classifier": ("classifier", None, "fused"),
    "embedder": ("embedder", "1.16.3", "fused"),
    "plain": ("classifier", "1.14.1", "standard"),
    "attention": ("classifier", "1.23", "standard"),
    "traps": ("traps", None, "fused"),
}
_OURS = [name for name in _ASKED if name != "traps"]


def _export(name: str) -> ir.Model:
    kind, version, ops = _ASKED[name]
    return export(_MODELS[kind](), Target.parse(version, ops))


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ir.Model]:
    """The graph of a name in `_ASKED`, as it comes from the exporter; all workers of pytest-xdist share one export."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str) -> ir.Model:
        path = folder / f"test_export_{name}.onnx"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_bytes(_bytes(_export(name)))
        return ir.load(path)

    return get


@pytest.fixture(scope="session")
def folded(exported: Callable[[str], ir.Model]) -> Callable[[str], ir.Model]:
    """The same after the one pass that every build runs first."""

    def get(name: str) -> ir.Model:
        model = exported(name)
        FoldConstants()(model)
        return model

    return get


def _bytes(model: ir.Model) -> bytes:
    proto: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return proto


def _operators(model: ir.Model) -> Counter[str]:
    return Counter(
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in model.graph.all_nodes()
    )


def _dims(value: ir.Value) -> list[int | str]:
    assert value.shape is not None
    return [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]


def _masks(batch: int, tokens: int) -> Iterator[NDArray[np.int64]]:
    """Full, right, left and holed masks, and one with an empty row."""
    full, place = np.ones((batch, tokens), np.int64), np.arange(tokens)
    yield full
    yield from (full * (place < (tokens + 1) // 2), full * (place >= tokens // 2), full * (place % 2 == 0))
    last = full.copy()
    last[-1] = 0
    yield last


def _eager(model: EagerModel, feeds: Sequence[NDArray[np.generic]]) -> list[NDArray[np.generic]]:
    with torch.no_grad():
        outputs = model.module(*(torch.from_numpy(array) for array in feeds))
    return [output.detach().numpy() for output in (outputs if isinstance(outputs, tuple) else (outputs,))]


@pytest.mark.parametrize("name", ["classifier", "embedder"])
def test_our_models_have_one_fused_attention_a_layer_and_no_shape_arithmetic(
    name: str, folded: Callable[[str], ir.Model]
) -> None:
    found = _operators(folded(name))
    assert found[_ATTENTION] == _LAYERS
    assert not found.keys() & {"Shape", "Size", "Reshape", "Transpose", "Expand", "Concat", "Softmax"}
    # Six products a layer without those inside attention, one that pools, and the head of the classifier.
    assert found["MatMul"] + found["Gemm"] == 6 * _LAYERS + (2 if name == "classifier" else 1)


@pytest.mark.parametrize("name", _OURS)
def test_no_control_flow_and_no_dropout_is_left(name: str, exported: Callable[[str], ir.Model]) -> None:
    assert not _operators(exported(name)).keys() & {"If", "Loop", "Scan", "Dropout"}


@pytest.mark.parametrize("name", ["plain", "attention"])
def test_standard_operators_come_from_the_default_domain_alone(name: str, folded: Callable[[str], ir.Model]) -> None:
    model = folded(name)
    assert {node.domain for node in model.graph.all_nodes()} == {""}
    assert set(model.opset_imports) == {""}
    assert not model.functions
    assert _operators(model)["Attention"] == (_LAYERS if name == "attention" else 0)
    assert _operators(model)["Softmax"] == (_LAYERS if name == "plain" else 0)


@pytest.mark.parametrize("name", _OURS)
def test_the_graph_computes_what_eager_does_at_sizes_the_exporter_never_saw(
    name: str, folded: Callable[[str], ir.Model]
) -> None:
    eager, graph = _MODELS[_ASKED[name][0]](), folded(name)
    rng = np.random.default_rng(0)
    for batch, tokens in [(1, 1), (3, 5), (2, 17), (1, _LONGEST)]:
        ids = rng.integers(0, 128, (batch, tokens))
        for mask in _masks(batch, tokens):
            (expected,) = _eager(eager, (ids, mask))
            (found,) = run_graph(graph, {"input_ids": ids, "attention_mask": mask}).values()
            # Reference: the eager module; bound: that of fp32 fidelity.
            assert np.isfinite(found).all()
            assert np.abs(found - expected).max() <= fidelity_bound(float(np.abs(expected).max()))


@pytest.mark.parametrize("name", _OURS)
def test_an_empty_row_is_settled_in_the_graph_as_in_eager(name: str, folded: Callable[[str], ir.Model]) -> None:
    ids = np.arange(8).reshape(2, 4)
    feeds = {"input_ids": ids, "attention_mask": np.array([[0, 0, 0, 0], [1, 1, 1, 0]])}
    (found,) = run_graph(folded(name), feeds).values()
    module = _MODELS[_ASKED[name][0]]().module
    expected = np.zeros(16) if name == "embedder" else module.head.bias.detach().numpy()  # type: ignore[union-attr, operator]
    # Zeros times finite numbers: exact.
    assert (found[0] == expected).all()


@pytest.mark.parametrize("name", _OURS)
def test_every_constant_is_finite_in_float16(name: str, folded: Callable[[str], ir.Model]) -> None:
    model = folded(name)
    tensors = [value.const_value for value in model.graph.initializers.values()]
    tensors += [
        attr.as_tensor()
        for node in model.graph.all_nodes()
        for attr in node.attributes.values()
        if attr.name == "value"
    ]
    floats = [tensor.numpy() for tensor in tensors if tensor is not None and tensor.dtype.is_floating_point()]
    assert floats
    assert all((np.abs(array) <= 65504).all() for array in floats)


@pytest.mark.parametrize("name", _OURS)
def test_ends_are_named_and_sized_as_in_the_spec(name: str, folded: Callable[[str], ir.Model]) -> None:
    eager, model = _MODELS[_ASKED[name][0]](), folded(name)
    assert [value.name for value in model.graph.inputs] == ["input_ids", "attention_mask"]
    assert [_dims(value) for value in model.graph.inputs] == [["batch", "tokens"]] * 2
    assert [value.name for value in model.graph.outputs] == [spec.name for spec in eager.outputs]
    assert [_dims(value) for value in model.graph.outputs] == [["batch", 16 if name == "embedder" else 2]]
    assert [str(value.dtype) for value in model.graph.inputs] == ["INT64", "INT64"]


def test_names_that_inner_values_and_weights_have_too_go_to_the_ends(exported: Callable[[str], ir.Model]) -> None:
    eager, graph = _traps(), exported("traps")
    assert [value.name for value in graph.graph.inputs] == [spec.name for spec in eager.inputs]
    assert [value.name for value in graph.graph.outputs] == [spec.name for spec in eager.outputs]
    # A dimension of at most 1 is none.
    assert _dims(graph.graph.inputs[2]) == [1, "batch"]
    _check_traps(graph)


def _check_traps(graph: ir.Model) -> None:
    eager, rng = _traps(), np.random.default_rng(0)
    for batch, tokens in [(1, 1), (4, 9)]:
        ids, scores = rng.integers(0, 6, (batch, tokens)), rng.normal(size=(1, batch)).astype(np.float32)
        for mask in _masks(batch, tokens):
            expected = _eager(eager, (ids, mask, scores))
            found = run_graph(graph, {"ids": ids, "attention_mask": mask, "embedding": scores})
            # A query at a padded position may see no key, and nobody reads its answer; an empty row is settled.
            real = ((mask != 0) | ~mask.any(axis=1, keepdims=True))[:, :, None]
            for array, spec, reference in zip(found.values(), eager.outputs, expected, strict=True):
                difference = np.abs(array - reference)
                judged = difference * real if array.ndim == 3 else difference
                # Reference: the eager module; bound: that of fp32 fidelity.
                assert judged.max() <= fidelity_bound(float(np.abs(reference).max())), spec.name


@pytest.mark.parametrize("name", list(_ASKED))
def test_no_path_of_this_machine_and_no_trace_of_the_exporter_is_in_the_graph(
    name: str, exported: Callable[[str], ir.Model]
) -> None:
    model = exported(name)
    graph, nodes = model.graph, list(model.graph.all_nodes())
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in nodes for value in node.outputs)]
    for props in (model.metadata_props, graph.metadata_props, *(node.metadata_props for node in nodes)):
        assert not props
    assert not [value.name for value in values if value.metadata_props or value.doc_string]
    assert not [text for text in (model.doc_string, graph.doc_string, *(node.doc_string for node in nodes)) if text]
    data = _bytes(model)
    for text in (str(Path(__file__).parents[1]), sys.prefix, ".py", "torch"):
        assert text.encode() not in data
    assert (model.producer_name, model.producer_version) == ("tx-export", None)


def test_two_exports_give_the_same_bytes(exported: Callable[[str], ir.Model]) -> None:
    assert _bytes(_export("classifier")) == _bytes(exported("classifier"))


@pytest.fixture
def _switches() -> Iterator[None]:
    enabled = torch.backends.mha.get_fastpath_enabled()
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


@pytest.mark.parametrize("fast_path", [True, False])
@pytest.mark.usefixtures("_switches")
def test_a_module_that_cannot_be_exported_is_named_with_the_reason_and_left_as_it_was(
    fast_path: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    tensors = ["x:float32[batch,tokens]", "mask:int64[batch,tokens]"]
    model = eager_model(_Branches(), tensors, ["y:float32[batch,tokens]"])
    model.module.train()
    torch.backends.mha.set_fastpath_enabled(fast_path)
    disabled = logging.root.manager.disable
    with pytest.raises(ExportError) as caught:
        export(dataclasses.replace(model, source="mine.py:Net"), Target.parse(None, "fused"))
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"mine.py:Net: {__file__}:") and "in _Branches: `x * 2 if mask.all() else" in first
    assert model.module.training
    assert model.module.dropout.training  # type: ignore[union-attr]
    assert torch.backends.mha.get_fastpath_enabled() is fast_path
    assert logging.root.manager.disable == disabled
    assert capfd.readouterr() == ("", "")


def test_a_module_in_training_is_exported_as_in_eval_and_stays_in_training() -> None:
    model = _traps()
    model.module.train()
    model.module.attention.eval()  # type: ignore[union-attr]
    enabled = torch.backends.mha.get_fastpath_enabled()
    graph = export(model, Target.parse("1.23", "standard"))
    assert "Dropout" not in _operators(graph)
    assert _operators(graph)["Attention"] == 1
    _check_traps(graph)
    in_training = {name for name, part in model.module.named_modules() if part.training}
    assert in_training == {"", "logits", "dropout"}
    assert torch.backends.mha.get_fastpath_enabled() is enabled


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (["y:float32[3]", "z:float32[3]"], r"the graph has 1 inputs and 1 outputs, 1 and 2 were declared"),
        (["x:float32[3]"], r"inputs and outputs must differ in name; given twice: x"),
    ],
)
def test_outputs_that_do_not_fit_the_declared_ones_are_refused(outputs: list[str], message: str) -> None:
    with pytest.raises(ExportError, match=f"tiny: {message}"):
        export(eager_model(nn.ReLU(), ["x:float32[3]"], outputs), Target.parse(None, "fused"))


@pytest.mark.parametrize(
    ("version", "ops", "opset", "ir_version", "spelling"),
    [
        (None, "fused", 18, 8, "fused"),
        (None, "standard", 18, 8, "plain"),
        ("1.14.1", "standard", 18, 8, "plain"),
        ("1.16.3", "fused", 18, 8, "fused"),
        ("1.17.1", "fused", 18, 8, "fused"),
        ("1.20.1", "standard", 18, 8, "plain"),
        ("1.22", "standard", 23, 10, "attention"),
        ("1.23", "standard", 23, 10, "attention"),
        ("1.23", "fused", 18, 8, "fused"),
        ("3.0", "standard", 23, 10, "attention"),
    ],
)
def test_a_target_names_the_opset_the_ir_version_and_the_operators(
    version: str | None, ops: Literal["fused", "standard"], opset: int, ir_version: int, spelling: str
) -> None:
    target = Target.parse(version, ops)
    assert (target.opset, target.ir_version, target.ops) == (opset, ir_version, spelling)


# What each release takes at most, from its compatibility table.
@pytest.mark.parametrize(
    ("version", "opset", "ir_version"), [("1.14.1", 18, 8), ("1.16.3", 19, 9), ("1.17.1", 20, 9), ("1.20.1", 21, 10)]
)
@pytest.mark.parametrize("ops", ["fused", "standard"])
def test_a_target_asks_for_no_more_than_its_release_takes(
    version: str, opset: int, ir_version: int, ops: Literal["fused", "standard"]
) -> None:
    target = Target.parse(version, ops)
    assert target.opset <= opset
    assert target.ir_version <= ir_version


@pytest.mark.parametrize("version", ["", "new", "1", "1.x", "v1.17", "1.17.1.1", "-1.17", "1.17rc1"])
def test_a_target_that_is_no_version_shows_the_form(version: str) -> None:
    with pytest.raises(ExportError, match=r"--target-ort '.*': expected X\.Y or X\.Y\.Z, say 1\.17"):
        Target.parse(version, "fused")


@pytest.mark.parametrize("version", ["1.13", "1.13.1", "0.20"])
def test_a_target_that_is_too_old_names_the_oldest(version: str) -> None:
    with pytest.raises(
        ExportError, match=f"--target-ort {version}: ONNX Runtime 1.14 is the oldest that takes opset 18"
    ):
        Target.parse(version, "fused")


@pytest.mark.parametrize("name", list(_ASKED))
def test_the_exported_graph_is_what_its_target_says(name: str, exported: Callable[[str], ir.Model]) -> None:
    target = Target.parse(*_ASKED[name][1:])
    model = exported(name)
    target.check(model, _MODELS[_ASKED[name][0]]())
    assert (model.opset_imports[""], model.ir_version) == (target.opset, target.ir_version)


def test_a_graph_written_for_a_newer_runtime_than_the_target_is_refused(exported: Callable[[str], ir.Model]) -> None:
    model, eager = exported("classifier"), _MODELS["classifier"]()
    assert least_onnxruntime(model) == "1.15.0"
    Target.parse("1.15", "fused").check(model, eager)
    with pytest.raises(
        ExportError,
        match=r"MultiHeadAttention needs ONNX Runtime 1\.15, the target is 1\.14; --ops standard does without it",
    ):
        Target.parse("1.14.1", "fused").check(model, eager)
    with pytest.raises(ExportError, match="asked for opset 23 and IR 10, the file has opset 18 and IR 8"):
        Target.parse("1.23", "standard").check(model, eager)


@pytest.mark.parametrize(
    ("opset", "ir_version", "expected"),
    [
        (18, 8, "1.14.0"),
        (19, 8, "1.15.0"),
        (18, 9, "1.16.0"),
        (21, 10, "1.18.0"),
        (23, 10, "1.22.0"),
        (24, 11, "1.24.0"),
    ],
)
def test_the_least_runtime_follows_from_the_opset_and_the_ir_version(
    opset: int, ir_version: int, expected: str
) -> None:
    head = f'<ir_version: {ir_version}, opset_import: ["" : {opset}]>'
    assert least_onnxruntime(graph_from_text(f"{head} g (float[2] x) => (float[2] y) {{ y = Neg(x) }}")) == expected


def test_a_graph_that_no_runtime_takes_is_an_error() -> None:
    text = '<ir_version: 99, opset_import: ["" : 18]> g (float[2] x) => (float[2] y) { y = Neg(x) }'
    with pytest.raises(ExportError, match="no ONNX Runtime is known that takes opset 18 and IR 99"):
        least_onnxruntime(graph_from_text(text))
