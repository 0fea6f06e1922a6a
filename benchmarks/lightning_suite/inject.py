"""A pytest plugin: Trainers of one CPU device that name no strategy get OffloadStrategy().

pytest -p benchmarks.lightning_suite.inject tests_pytorch/loops
"""

import functools
from typing import Any

from lightning.pytorch import Trainer

from trainers import OffloadStrategy

PLAIN: dict[str, tuple[Any, ...]] = {
    "strategy": (None, "auto"),
    "accelerator": (None, "auto", "cpu"),
    "devices": (None, "auto", 1, "1"),
    "num_nodes": (None, 1),
    "plugins": (None,),
}
"""The arguments with which a Trainer gets our strategy; None means that it is not given."""


def pytest_configure() -> None:
    plain = Trainer.__init__

    @functools.wraps(plain)
    def with_strategy(self: Trainer, *args: Any, **kwargs: Any) -> None:
        if not args and all(kwargs.get(name) in values for name, values in PLAIN.items()):
            kwargs["strategy"] = OffloadStrategy()
        plain(self, *args, **kwargs)

    Trainer.__init__ = with_strategy  # type: ignore[method-assign]
