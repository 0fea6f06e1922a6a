"""Whether a step computes with the epoch: then each epoch has a graph of its own.

traced for any epoch    the epoch is used, or the traces differ    traced for this epoch alone
"""

from collections.abc import Callable
from typing import TypeVar

from offload import TracesDiffer
from trainers.offloading.tracing.opaque_numbers import EpochUsed

Made = TypeVar("Made")


class Epochs:
    """What is known of the steps of one kind. Most do not compute with the epoch."""

    def __init__(self) -> None:
        self.read = False

    def trace(self, make: Callable[[], Made]) -> Made:
        """Trace a step by `make`, for any epoch or, if `read`, for the present one."""
        if self.read:
            return make()
        try:
            return make()
        except (EpochUsed, TracesDiffer) as error:
            self.read = True
            try:
                return make()
            except TracesDiffer:
                self.read = False  # something else differs
                raise error from None
