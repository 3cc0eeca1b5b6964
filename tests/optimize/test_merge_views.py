"""Chains of views become nothing, one Slice, one Transpose or one Reshape, and never another answer."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from tx_export.optimize.merge_views import MergeViews
from tx_export.passes import Outcome
from tx_export.testing import graph_from_text, run_graph

_RUN = {"b": 2, "t": 5}  # what the named dimensions are in a run
Sizes = list[int | str]


class Chain:
    """A graph of views over x, whose values carry the sizes that an export would give them."""

    def __init__(self, sizes: Sizes) -> None:
        dims = ", ".join(map(str, sizes))
        self.model = graph_from_text(
            f"""<ir_version: 8, opset_import: ["" : 18]> g (float[{dims}] x) => (float[b] y) {{ y = Neg (x) }}"""
        )
        self.value, self.sizes = self.model.graph.inputs[0], list(sizes)
        self.end = self.model.graph.node(0)

    def add(self, op: str, inputs: list[np.ndarray], sizes: Sizes, **attributes: int | list[int]) -> Chain:
        graph = self.model.graph
        constants = []
        for array in inputs:
            name = f"c{len(graph.initializers)}"
            value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            graph.register_initializer(value)
            constants.append(value)
        node = ir.node(op, [self.value, *constants], attributes)
        graph.insert_before(self.end, node)
        self.value, self.sizes = node.outputs[0], sizes
        self.value.shape, self.value.dtype = ir.Shape(sizes), ir.DataType.FLOAT
        return self

    def reshape(self, *sizes: int | str) -> Chain:
        target = np.array([size if isinstance(size, int) else _number(size) for size in sizes], np.int64)
        return self.add("Reshape", [target], list(sizes))

    def transpose(self, *order: int) -> Chain:
        return self.add("Transpose", [], [self.sizes[axis] for axis in order], perm=list(order))

    def take(self, axis: int, index: int) -> Chain:
        sizes = self.sizes[:axis] + self.sizes[axis + 1 :]
        return self.add("Gather", [np.array(index, np.int64)], sizes, axis=axis)

    def cut(self, axis: int, start: int, end: int) -> Chain:
        sizes = [*self.sizes[:axis], end - start, *self.sizes[axis + 1 :]]
        return self.add("Slice", [np.array([number], np.int64) for number in (start, end, axis)], sizes)

    def unsqueeze(self, axis: int) -> Chain:
        return self.add("Unsqueeze", [np.array([axis], np.int64)], [*self.sizes[:axis], 1, *self.sizes[axis:]])

    def squeeze(self, axis: int) -> Chain:
        return self.add("Squeeze", [np.array([axis], np.int64)], self.sizes[:axis] + self.sizes[axis + 1 :])

    def merged(self) -> list[str]:
        """The operators that are left of the chain; the answer is the same bit for bit."""
        self.end.replace_input_with(0, self.value)
        self.end.outputs[0].shape = ir.Shape(self.sizes)
        before = self._run()
        outcome = MergeViews()(self.model)
        assert isinstance(outcome, Outcome)
        after = self._run()
        assert before.shape == after.shape
        assert np.array_equal(before, after)
        operators = [node.op_type for node in self.model.graph][:-1]
        assert not MergeViews()(self.model).modified
        return operators

    def _run(self) -> np.ndarray:
        dims = self.model.graph.inputs[0].shape
        assert dims is not None
        sizes = [dim if isinstance(dim, int) else _number(str(dim.value)) for dim in dims]
        return run_graph(self.model, {"x": np.arange(math.prod(sizes), dtype=np.float32).reshape(sizes)})["y"]


def _number(name: str) -> int:
    return int(math.prod(int(part) if part.isdecimal() else _RUN[part] for part in name.split("*")))


def heads(chain: Chain) -> Chain:
    """[b, t, 24] -> [b, 3, t, 8]."""
    return chain.reshape("b", "t", 3, 8).transpose(0, 2, 1, 3)


def test_heads_that_are_split_and_merged_again_are_nothing() -> None:
    assert heads(Chain(["b", "t", 24])).transpose(0, 2, 1, 3).reshape("b", "t", 24).merged() == []


def test_a_packed_product_cut_in_any_way_is_one_slice() -> None:
    packed = Chain(["b", "t", 72]).reshape("b", "t", 3, 3, 8).transpose(2, 0, 3, 1, 4).take(0, 1)
    assert packed.transpose(0, 2, 1, 3).reshape("b", "t", 24).merged() == ["Slice"]
    assert Chain(["b", "t", 72]).cut(2, 24, 48).reshape("b", "t", 3, 8).reshape("b", "t", 24).merged() == ["Slice"]


def test_the_stock_layout_with_tokens_first_is_one_transpose() -> None:
    chain = Chain(["b", "t", 24]).transpose(1, 0, 2).reshape("t", "3*b", 8).transpose(1, 0, 2)
    assert chain.reshape("b", 3, "t", 8).transpose(2, 0, 1, 3).reshape("t", "b", 24).merged() == ["Transpose"]


def test_reshapes_of_reshapes_are_one() -> None:
    assert Chain(["b", "t", 24]).reshape("b", "t", 4, 6).unsqueeze(1).reshape("b", "t", 12, 2).merged() == ["Reshape"]


def test_a_target_that_copies_sizes_of_its_input_is_written_anew() -> None:
    chain = Chain(["b", "t", 24]).reshape("b*t", 24)
    chain.add("Reshape", [np.array([0, 3, 8], np.int64)], ["b*t", 3, 8])
    assert chain.merged() == ["Reshape"]


def test_a_target_that_allowed_zeros_copies_sizes_when_it_is_written_anew() -> None:
    chain = Chain(["b", "t", 24]).reshape("b*t", 24)
    target = np.array([_RUN["b"], _RUN["t"], 3, 8], np.int64)
    assert chain.add("Reshape", [target], ["b", "t", 3, 8], allowzero=1).merged() == ["Reshape"]


def test_every_second_channel_is_no_range() -> None:
    chain = Chain(["b", "t", 24]).reshape("b", "t", 12, 2).take(3, 1)
    assert chain.merged() == ["Reshape", "Gather"]


def test_channels_in_another_order_stay_so() -> None:
    chain = Chain(["b", "t", 24]).reshape("b", "t", 3, 8).transpose(0, 1, 3, 2).reshape("b", "t", 24)
    assert chain.merged() == ["Reshape", "Transpose", "Reshape"]


def test_two_named_dimensions_that_change_places_are_not_taken_for_each_other() -> None:
    assert Chain(["b", "t", 24]).transpose(1, 0, 2).reshape("b", "t", 24).merged() == ["Transpose", "Reshape"]


@pytest.mark.parametrize("seed", range(60))
def test_no_chain_of_views_changes_its_answer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bases: tuple[Sizes, ...] = (["b", "t", 24], ["t", 12, "b"], [6, "b", "t", 4])
    chain = Chain(bases[seed % 3])
    for _ in range(int(rng.integers(2, 8))):
        _random_step(chain, rng)
    chain.merged()


def _random_step(chain: Chain, rng: np.random.Generator) -> None:
    sizes = chain.sizes
    kind, axis = rng.choice(["split", "join", "transpose", "take", "cut", "unsqueeze"]), int(rng.integers(len(sizes)))
    size = sizes[axis]
    if kind == "split" and isinstance(size, int) and size > 1:
        factor = int(rng.choice([n for n in range(1, size + 1) if size % n == 0]))
        chain.reshape(*sizes[:axis], factor, size // factor, *sizes[axis + 1 :])
    elif kind == "join" and axis + 1 < len(sizes):
        after = sizes[axis + 1]
        joined = size * after if isinstance(size, int) and isinstance(after, int) else f"{size}*{after}"
        chain.reshape(*sizes[:axis], joined, *sizes[axis + 2 :])
    elif kind == "transpose":
        chain.transpose(*rng.permutation(len(sizes)).tolist())
    elif kind == "take" and isinstance(size, int) and len(sizes) > 1:
        chain.take(axis, int(rng.integers(size)))
    elif kind == "cut" and isinstance(size, int):
        start = int(rng.integers(size))
        chain.cut(axis, start, int(rng.integers(start + 1, size + 1)))
    elif kind == "unsqueeze" and len(sizes) < 6:
        chain.unsqueeze(axis)
