"""Laws of loaders make thousands of loaders: none of them asks whether reading varies."""

from collections.abc import Iterator

import pytest

from loaders import read_check


@pytest.fixture(autouse=True, scope="module")
def unprobed() -> Iterator[None]:
    """A probe reads up to 24 samples, which takes nine tenths of a loader's start here. Units and
    integration tests have it: test_read_check.py says what it finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_check, "variation", lambda samples, read: None)
        yield
