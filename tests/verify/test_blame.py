"""Blame: the module that a fault was planted in is named. The reference is the place where the test planted it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn

from tx_export import _blame, plugins
from tx_export._alike import agreement
from tx_export._blame import blame
from tx_export._eager_trace import Moment, Origin
from tx_export._graph import add_initializer, add_node
from tx_export.artifact import open_graph
from tx_export.errors import BudgetError
from tx_export.export import Target, export
from tx_export.load import load
from tx_export.metrics import Budget
from tx_export.spec import EagerModel
from tx_export.testing import eager_model, matmul_model, tiny_classifier
from tx_export.verify import Case, Judge, Step

from .lines import LINES

Fault = Callable[[ir.Model], None]

_SETTINGS = plugins.find("provider", "cpu")().session()
_PLAIN = "fold_constants"
_FUSED = "fold_constants fuse_gelu pack_qkv fuse_bias_gelu"

_SOURCE = '''
import torch
from torch import nn


class Block(nn.Module):
    """Tokens first, [T, B, 16]; wrong in a graph on its second call, and only there."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, step):
        y = self.down(torch.relu(self.up(self.norm(x))))
        return x + y * 3 if step == 1 and torch.onnx.is_in_onnx_export() else x + y


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(40, 16), Block(), nn.Linear(16, 3)

    def forward(self, ids):
        x = self.table(ids).transpose(0, 1)
        for step in range(3):
            x = self.block(x, step)
        scores = self.head(x.transpose(0, 1))
        return {"scores": scores, "best": scores.argmax(-1)}

    def tx_inputs(self):
        return ["ids:int64[batch,tokens<=24]"]
'''


@pytest.fixture(scope="module")
def classifier() -> EagerModel:
    return tiny_classifier()


@pytest.fixture(scope="module")
def judge(classifier: EagerModel) -> Judge:
    """For exact checks only: lossy ones widen what later ones may cause."""
    return Judge(classifier, LINES)


@pytest.fixture(scope="module")
def exported(classifier: EagerModel) -> bytes:
    graph: bytes = ir.to_proto(export(classifier, Target.parse(None, "fused"))).SerializeToString()
    return graph


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    path = tmp_path_factory.mktemp("users") / "stack.py"
    path.write_text(_SOURCE, encoding="utf-8")
    return load(f"{path}:Stack")


@pytest.fixture(scope="module")
def wrong_stack(stack: EagerModel) -> bytes:
    graph: bytes = ir.to_proto(export(stack, Target.parse(None, "fused"))).SerializeToString()
    return graph


def refusal(
    judge: Judge, exported: bytes, passes: str, fault: Fault = lambda graph: None, budget: Budget | None = None
) -> str:
    """What a judge says of a graph behind some passes, with a fault planted there."""
    import onnx

    graph = ir.from_proto(onnx.load_from_string(exported))
    for name in passes.split():
        plugins.find("pass", name)()(graph)
    fault(graph)
    with pytest.raises(BudgetError) as caught:
        judge.check(Step("planted", open_graph(graph, _SETTINGS), budget, graph=graph))
    message = str(caught.value)
    assert message.startswith("planted: ")
    assert "\n" not in message
    return message


def changed(name: str, change: Callable[[Any], Any]) -> Fault:
    """A weight is another one."""

    def plant(graph: ir.Model) -> None:
        value = next(value for key, value in graph.graph.initializers.items() if key.startswith(name))
        assert value.const_value is not None
        value.const_value = ir.tensor(change(value.const_value.numpy().copy()), name=value.name)

    return plant


def scrambled(array: Any) -> Any:
    return np.random.default_rng(0).standard_normal(array.shape).astype(array.dtype)


def spoilt(array: Any) -> Any:
    array.flat[3] = np.nan
    return array


def rescaled_attention(graph: ir.Model) -> None:
    """The second layer's attention divides by nothing."""
    node = [node for node in graph.graph if node.op_type in ("MultiHeadAttention", "Attention")][1]
    node.attributes["scale"] = ir.AttrFloat32("scale", 1.0)


def biased_attention(graph: ir.Model) -> None:
    """The second layer's attention adds the biases of query, key and value itself, and divides by nothing."""
    node = [node for node in graph.graph if node.op_type == "MultiHeadAttention"][1]
    biases = []
    for index in range(3):
        product, bias = node.inputs[index].producer().inputs  # type: ignore[union-attr]
        node.replace_input_with(index, product)
        biases.append(bias.const_value.numpy())  # type: ignore[union-attr]
    node.replace_input_with(3, add_initializer(graph.graph, "biases", np.concatenate(biases)))
    RemoveUnusedNodesPass()(graph)
    rescaled_attention(graph)


_ATTENTION = "encoder.layers.1.attention (MultiHeadAttention)"


@pytest.mark.parametrize("passes", [_PLAIN, _FUSED])
@pytest.mark.parametrize(
    ("fault", "blamed"),
    [
        (changed("encoder.embedding.", lambda a: a * 2), "encoder.embedding (Embedding): off by"),
        (
            changed("encoder.layers.0.attention_norm.weight", lambda a: -a),
            "encoder.layers.0.attention_norm (LayerNorm)",
        ),
        (
            changed("encoder.layers.1.feed_forward.up.bias", lambda a: a * 3),
            "encoder.layers.1.feed_forward.up (Linear)",
        ),
        (
            changed("encoder.layers.1.feed_forward.down.weight", scrambled),
            "encoder.layers.1.feed_forward.down (Linear)",
        ),
        (changed("encoder.layers.0.feed_forward.down.weight", spoilt), "encoder.layers.0.feed_forward.down (Linear): "),
        (changed("head.bias", lambda a: a + np.array([0.25, 0], np.float32)), "head (Linear): off by 0.25 there"),
    ],
    ids=["scaled table", "turned norm", "bias inside a fused operator", "scrambled weight", "nan", "head"],
)
def test_the_module_whose_weight_changed_is_blamed(
    judge: Judge, exported: bytes, passes: str, fault: Fault, blamed: str
) -> None:
    assert f"; the first module that differs is {blamed}" in refusal(judge, exported, passes, fault)


@pytest.mark.parametrize(
    ("passes", "fault", "blamed"),
    [
        (_PLAIN, changed("encoder.layers.1.attention.query.weight", scrambled), "encoder.layers.1.attention.query"),
        (_FUSED, changed("encoder.layers.1.attention.qkv.weight", scrambled), _ATTENTION),
        (
            _PLAIN,
            rescaled_attention,
            f"{_ATTENTION}, in its own forward behind encoder.layers.1.attention.value (Linear)",
        ),
        (_FUSED, rescaled_attention, f"{_ATTENTION}: off by"),
        (
            _PLAIN,
            biased_attention,
            f"{_ATTENTION}, in its own forward behind encoder.layers.1.attention.value (Linear)",
        ),
        (_FUSED, changed("encoder.layers.1.attention.qkv.bias", spoilt), f"{_ATTENTION}: "),
    ],
)
def test_what_was_fused_away_is_not_blamed_and_the_module_around_it_is(
    judge: Judge, exported: bytes, passes: str, fault: Fault, blamed: str
) -> None:
    assert f"; the first module that differs is {blamed}" in refusal(judge, exported, passes, fault)


def test_the_first_product_in_int8_is_blamed_for_a_budget_that_none_can_meet(
    classifier: EagerModel, exported: bytes
) -> None:
    message = refusal(Judge(classifier, LINES), exported, "fold_constants dynamic_int8", budget=Budget(sqnr_db=90))
    assert "; the first module that differs is encoder.layers.0.attention.query (Linear): sqnr_db" in message
    assert "is less than 90 there" in message


def test_a_fault_among_int8_products_is_told_from_their_own_error(classifier: EagerModel, exported: bytes) -> None:
    def plant(graph: ir.Model) -> None:
        plugins.find("pass", "dynamic_int8")()(graph)
        changed("encoder.layers.1.feed_forward.down.weight.scale", lambda a: a * 4)(graph)

    # Each int8 product has more than 30 dB here, and four times an output -9.5 dB against itself.
    message = refusal(Judge(classifier, LINES), exported, _FUSED, plant, Budget(sqnr_db=20))
    assert "; the first module that differs is encoder.layers.1.feed_forward.down (Linear): sqnr_db" in message


@pytest.mark.parametrize(("passes", "budget"), [(_PLAIN, None), ("fold_constants dynamic_int8", Budget(sqnr_db=20))])
def test_a_users_module_that_is_another_in_the_graph_is_blamed_by_its_own_path_and_call(
    stack: EagerModel, wrong_stack: bytes, passes: str, budget: Budget | None
) -> None:
    message = refusal(Judge(stack, LINES), wrong_stack, passes, budget=budget)
    assert "; the first module that differs is block (Block), call 2, in its own forward" in message
    assert "behind block.down (Linear), call 2" in message


def test_where_a_run_fails_the_first_module_without_a_value_is_blamed(judge: Judge, exported: bytes) -> None:
    def plant(graph: ir.Model) -> None:
        norm = [node for node in graph.graph if node.op_type == "LayerNormalization"][1]
        value = norm.outputs[0]
        shape = add_initializer(graph.graph, "shape", np.array([1, 1, 16]))
        (cut,) = add_node(next(iter(value.uses())).node, "Reshape", [value, shape])
        value.replace_all_uses_with(cut, replace_graph_outputs=False)
        cut.producer().replace_input_with(0, value)  # type: ignore[union-attr]

    message = refusal(judge, exported, _PLAIN, plant)
    assert "planted: fails in case 2x1 full mask: " in message
    assert "; the first module that is not computed is encoder.layers.1.attention.query (Linear)" in message


def test_a_value_agrees_with_a_tensor_whose_axes_are_in_another_order() -> None:
    array = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    moment = Moment(array, np.ones(array.shape, bool), Origin("part", 1, returned=True))
    assert agreement(moment, array.swapaxes(0, 1), None) is not None
    assert agreement(moment, array.swapaxes(0, 1).reshape(6, 4), None) is None  # rows of other tokens


class _Masked(nn.Module):
    def forward(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        """Hidden scores [B, T] become -inf."""
        return scores.masked_fill(attention_mask == 0, -torch.inf)


class _Weighted(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        """NaN where nothing is visible."""
        return scores.softmax(dim=-1)


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masked, self.weighted = _Masked(), _Weighted()

    def forward(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.weighted(self.masked(scores, attention_mask)) * 2
        return out


def test_eager_itself_is_blamed_where_it_is_not_finite() -> None:
    inputs = ("scores:float32[batch,tokens<=8]", "attention_mask:int64[batch,tokens<=8]{0..1}")
    model = eager_model(_Outer(), inputs, ("y:float32[batch,tokens<=8]",))
    feeds: dict[str, NDArray[Any]] = {
        "scores": np.ones((1, 4), np.float32),
        "attention_mask": np.zeros((1, 4), np.int64),
    }
    clause = blame(model, model.module, matmul_model(np.eye(4, dtype=np.float32)), Case("empty", feeds), None)
    assert clause == "eager itself is not finite there, first in weighted (_Weighted)"


def test_a_failure_is_told_as_it_is_when_nobody_can_be_blamed(
    judge: Judge, exported: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no hooks here")

    monkeypatch.setattr(_blame, "trace", fail)
    message = refusal(judge, exported, _PLAIN, changed("head.bias", lambda a: a + np.array([0.25, 0], np.float32)))
    assert message.startswith("planted: output 'logits' is off by 0.25")
    assert "module" not in message


def test_the_eager_module_and_the_graph_are_left_as_they_were(classifier: EagerModel, exported: bytes) -> None:
    import onnx

    graph = ir.from_proto(onnx.load_from_string(exported))
    changed("head.bias", lambda a: a + 1)(graph)
    before = ir.to_proto(graph).SerializeToString()
    feeds = {"input_ids": np.ones((1, 3), np.int64), "attention_mask": np.ones((1, 3), np.int64)}
    assert blame(classifier, classifier.module, graph, Case("full", feeds), None) is not None
    assert ir.to_proto(graph).SerializeToString() == before
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in classifier.module.modules())
