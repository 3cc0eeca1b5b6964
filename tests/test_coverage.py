"""What two passes changed together is counted once."""

from __future__ import annotations

from tx_export._coverage import of_graph_passes, of_module_passes
from tx_export.passes import Coverage, Left, Stored


def test_a_weight_that_a_later_pass_stores_is_not_left_by_the_earlier_one_nor_counted_twice() -> None:
    first = Coverage(2, 4, (Left("c", "wide"), Left("d", "small")), stored=(Stored("a", 8, 2, "int8"),))
    second = Coverage(1, 2, (Left("d", "too small"),), stored=(Stored("c", 8, 1, "int4"),))
    both = of_graph_passes(first, second)
    # Of the four, three are done, and the later reason of the fourth is told.
    assert (both.done, both.of, both.left) == (3, 4, (Left("d", "too small"),))
    assert [item.name for item in both.stored] == ["a", "c"]


def test_a_weight_that_an_earlier_pass_stores_is_not_left_by_the_later_one() -> None:
    first = Coverage(1, 1, stored=(Stored("a", 8, 2, "int8"),))
    both = of_graph_passes(first, Coverage(1, 2, (Left("a", "no float"),), stored=(Stored("b", 8, 1, "int4"),)))
    assert (both.done, both.of, both.left) == (2, 2, ())


def test_passes_over_different_weights_add_up() -> None:
    both = of_graph_passes(Coverage(2, 3, (Left("a", "x"),)), Coverage(4, 6, (Left("b", "y"), Left("c", "z"))))
    assert (both.done, both.of, both.left) == (6, 9, (Left("a", "x"), Left("b", "y"), Left("c", "z")))


def test_heads_that_are_pruned_twice_are_counted_once_with_the_numbers_of_the_first_module() -> None:
    first = Coverage(3, 8, kept=((0, (0, 2, 3)), (1, (1, 3))))
    second = Coverage(2, 5, kept=((0, (1, 2)), (1, (1,))))  # of the heads 0, 2, 3 those that are 2 and 3; of 1, 3 the 3
    both = of_module_passes(first, second)
    assert (both.done, both.of) == (5, 8)
    assert both.kept == ((0, (2, 3)), (1, (3,)))


def test_a_layer_that_a_first_pass_left_without_heads_stays_told() -> None:
    both = of_module_passes(Coverage(4, 8, kept=((0, (0, 1, 2, 3)), (1, ()))), Coverage(1, 4, kept=((0, (0, 1, 3)),)))
    assert (both.done, both.of, both.kept) == (5, 8, ((0, (0, 1, 3)), (1, ())))


def test_weights_that_are_zero_behind_two_passes_are_counted_by_the_later_one() -> None:
    both = of_module_passes(Coverage(30, 100), Coverage(50, 100))
    assert (both.done, both.of) == (50, 100)
