"""What two passes with one place in the manifest changed together."""

from __future__ import annotations

from tx_export.passes import Coverage

__all__ = ["of_graph_passes", "of_module_passes"]


def of_graph_passes(first: Coverage, second: Coverage) -> Coverage:
    """A weight that one of them stores is not left by the other, and none is left twice."""
    told = {item.name for item in second.left} | {item.name for item in second.stored}
    made = {item.name for item in first.stored}
    left = [item for item in first.left if item.name not in told]
    left += [item for item in second.left if item.name not in made]
    again = len(first.left) + len(second.left) - len(left)
    stored = (*first.stored, *second.stored)
    done, of = first.done + second.done, first.of + second.of - again
    return Coverage(done, of, tuple(left), stored=stored, measured=first.measured + second.measured)


def of_module_passes(first: Coverage, second: Coverage) -> Coverage:
    """The second one counts, and numbers the heads of, what the first one left there; here it is all that was there."""
    numbers = dict(first.kept)
    kept = numbers | {
        layer: tuple(numbers[layer][head] for head in heads) if layer in numbers else heads
        for layer, heads in second.kept
    }
    done = first.of - second.of + second.done
    return Coverage(done, first.of, (*first.left, *second.left), tuple(sorted(kept.items())))
