"""Counts how many ids of an order are computed."""

import numpy as np
import pytest
from numpy.typing import NDArray

from loaders.order.keyed_permutation import KeyedPermutation


def count_computed_ids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list whose one number grows by each id that is computed from now on."""
    computed = [0]
    walked = KeyedPermutation._walked  # pyright: ignore[reportPrivateUsage]

    def counting(self: KeyedPermutation, places: NDArray[np.int64]) -> NDArray[np.int64]:
        computed[0] += len(places)
        return walked(self, places)

    monkeypatch.setattr(KeyedPermutation, "_walked", counting)
    return computed
