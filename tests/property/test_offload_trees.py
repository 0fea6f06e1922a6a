"""Tensors in what an op is given: as PyTorch's own tree functions find them."""

from collections import namedtuple
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from offload.program.trees import leaves, tensors_of

Pair = namedtuple("Pair", "first second")
ENDS = st.one_of(st.none(), st.integers(), st.booleans(), st.builds(torch.ones, st.just(1)))
TREES = st.recursive(
    ENDS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=12,
)


@given(TREES)
def test_they_are_pytorchs(tree: Any) -> None:
    expected = pytree.tree_leaves(tree)
    assert [id(leaf) for leaf in leaves(tree)] == [id(leaf) for leaf in expected]
    assert all(isinstance(t, torch.Tensor) for t in tensors_of(tree))
    assert len(tensors_of(tree)) == sum(isinstance(leaf, torch.Tensor) for leaf in expected)
