"""A state taken apart travels as JSON and raw tensors, and is the same again at the other end."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import examples

from trainers.elastic.errors import CannotBeElastic
from trainers.elastic.peer.donated_state import put_together, take_apart

TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8)


@st.composite
def some_tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.sampled_from([(), (0,), (3,), (2, 2)]))
    made = torch.randint(0, 2, shape).to(draw(st.sampled_from(TYPES)))
    return made.t() if len(shape) == 2 and draw(st.booleans()) else made


KEYS = st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    some_tensors(),
    st.builds(lambda n: np.arange(n, dtype=np.float64), st.integers(0, 3)),
    st.builds(Path, st.sampled_from(["a", "a/b"])),
    st.sampled_from(TYPES),
    st.builds(lambda dims: torch.Size(dims), st.lists(st.integers(0, 9), max_size=3)),
    st.sets(st.integers(), max_size=3),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, float):
        signs = math.copysign(1, one) == math.copysign(1, other)
        return (math.isnan(one) and math.isnan(other)) or (one == other and signs)
    return bool(one == other)


@settings(max_examples=examples(200))
@given(TREES)
def test_what_is_taken_apart_comes_together_again(tree: Any) -> None:
    plain, tensors = take_apart(tree)
    assert all(t.is_contiguous() and t.device.type == "cpu" for t in tensors)
    assert same(put_together(json.loads(json.dumps(plain)), tensors), tree)


def test_tensors_are_copies() -> None:
    weights = torch.zeros(2)
    _, [copy] = take_apart({"w": weights})
    weights += 1
    assert copy.tolist() == [0, 0]


def test_what_cannot_be_sent_is_named_with_its_place() -> None:
    with pytest.raises(CannotBeElastic, match=r"state at \.callbacks\.mine\[1\].*is a object"):
        take_apart({"callbacks": {"mine": [1, object()]}})
    with pytest.raises(CannotBeElastic, match="unknown kind 'code'"):
        put_together({"code": "import os"}, [])
