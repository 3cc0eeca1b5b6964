"""The text form of a tensor, and what an EagerModel is made of."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tx_export.errors import LoadError
from tx_export.spec import Dim, TensorSpec

_NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
_DIMS = st.one_of(
    st.integers(1, 10**6),
    st.builds(Dim, _NAMES),
    st.builds(Dim, _NAMES, bound=st.one_of(st.none(), st.integers(1, 10**6))),
)
_DTYPES = st.sampled_from(["int64", "int32", "uint8", "bool", "float32", "float16", "float64"])
_NUMBERS = st.one_of(st.integers(-(10**12), 10**12), st.floats(allow_nan=False, allow_infinity=False))


@st.composite
def _tensors(draw: st.DrawFn) -> TensorSpec:
    name = draw(_NAMES) + draw(st.sampled_from(["", ".0", ".a.b"]))
    low, high = sorted(draw(st.tuples(_NUMBERS, _NUMBERS)))
    bounds = draw(st.sampled_from([(None, None), (low, high)]))
    return TensorSpec(name, draw(_DTYPES), tuple(draw(st.lists(_DIMS, max_size=4))), *bounds)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(_tensors())
def test_the_text_form_gives_the_same_tensor_back(spec: TensorSpec) -> None:
    assert TensorSpec.parse(str(spec)) == spec


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(alphabet="ab1_.:[]{}<=,-e ", max_size=24))
def test_any_text_is_read_or_refused_by_a_load_error(text: str) -> None:
    try:
        spec = TensorSpec.parse(text)
    except LoadError as error:
        assert str(error).startswith("input ")
    else:
        assert TensorSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "input_ids:int64[batch,tokens<=512]{0..29999}",
            TensorSpec("input_ids", "int64", (Dim("batch"), Dim("tokens", 512)), 0, 29999),
        ),
        (" x:float32[ 3 , n ] ", TensorSpec("x", "float32", (3, Dim("n")))),
        ("ids:int64[n]{0..1234567}", TensorSpec("ids", "int64", (Dim("n"),), 0, 1234567)),
        ("x:float32[n]{-0.5..0.25}", TensorSpec("x", "float32", (Dim("n"),), -0.5, 0.25)),
        ("x:float32[n]{1.5e-07..1e3}", TensorSpec("x", "float32", (Dim("n"),), 1.5e-07, 1000.0)),
        ("step:int64[]", TensorSpec("step", "int64", ())),
        ("x:int[4]", TensorSpec("x", "int64", (4,))),
    ],
)
def test_the_text_form_is_read_as_documented(text: str, expected: TensorSpec) -> None:
    assert TensorSpec.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("input_ids", r"expected NAME:DTYPE\[DIM,...\]\{LO..HI\}"),
        ("x:int64[batch", r"expected NAME:DTYPE"),
        ("x:int64[batch]{0..}", r"expected NAME:DTYPE"),
        ("x:int64[batch] y:int64[batch]", r"expected NAME:DTYPE"),
        ("x:banana[batch]", r"input 'x': 'banana' is not a NumPy dtype"),
        ("x:object[batch]", r"input 'x': 'object' is not a dtype of numbers"),
        ("x:complex128[batch]", r"input 'x': 'complex128' is not a dtype of numbers"),
        ("x:int64[batch,to kens]", r"input 'x': dim 'to kens' is neither a number, a name nor name<=bound"),
        ("x:int64[batch,]", r"input 'x': dim '' is neither"),
        ("x:int64[-1]", r"input 'x': dim '-1' is neither"),
        ("x:int64[0]", r"input 'x': dim '0' is empty; it must be at least 1"),
        ("x:int64[tokens<=0]", r"input 'x': dim 'tokens<=0' is empty"),
        ("x:int64[n]{a..5}", r"input 'x': 'a' in its range is not a number"),
        ("x:int64[n]{1..2..3}", r"input 'x': '2..3' in its range is not a number"),
        ("x:float32[n]{0..1e999}", r"input 'x': '1e999' in its range is not finite"),
        ("x:int64[n]{5..4}", r"input 'x': the range 5..4 is empty"),
    ],
)
def test_a_text_that_is_no_tensor_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        TensorSpec.parse(text)


def test_a_shape_takes_the_sizes_of_its_named_dims() -> None:
    assert TensorSpec.parse("x:float32[batch,3,tokens<=9]").shape({"tokens": 7, "batch": 2}) == (2, 3, 7)


@pytest.mark.parametrize(("name", "expected"), [("attention_mask", True), ("mask", True), ("mask_ids", False)])
def test_a_mask_is_known_by_the_end_of_its_name(name: str, expected: bool) -> None:
    assert TensorSpec(name, "int64", (Dim("batch"),)).is_mask is expected


def test_a_mask_with_a_range_of_its_own_is_drawn_from_it() -> None:
    assert TensorSpec.parse("attention_mask:int64[b,t]").is_mask
    assert TensorSpec.parse("attention_mask:int64[b,t]{0..1}").is_mask
    assert not TensorSpec.parse("attention_mask:float32[b,1,1,t]{-10000..0}").is_mask
