"""What the fake GPU (fakecuda/) cannot say: tests of it are skipped there, each with its reason."""

import os

import pytest

FAKE = "FAKE_CUDA" in os.environ
"""Whether this process runs on the fake GPU."""


def not_on_a_fake_gpu(why: str) -> pytest.MarkDecorator:
    """`why`: what the test needs of a real one."""
    return pytest.mark.skipif(FAKE, reason=f"needs a real GPU: {why}")
