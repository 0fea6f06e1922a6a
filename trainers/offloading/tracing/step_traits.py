"""What is known of the steps of one kind: most neither compute with the epoch nor gather tensors.

traced for any epoch          the epoch is used, or the traces differ    traced for this epoch alone
traced with the lists         a list keeps a tensor of the step          traced with stand-ins for
of the module as they are                                                them (gathered_lists.py)
"""

from collections.abc import Callable
from typing import TypeVar

from offload import TensorsKept, TracesDiffer
from trainers.offloading.tracing.opaque_numbers import EpochUsed

Made = TypeVar("Made")


class StepTraits:
    """They are found out by tracing, and kept for all later traces."""

    def __init__(self, gathers: bool = False) -> None:
        self.reads_epoch = False
        """Whether each epoch has a graph of its own."""
        self.gathers = gathers
        """Whether appends to lists of the module are put off."""

    def trace(self, make: Callable[[], Made]) -> Made:
        """Trace a step by `make`, which looks at these traits."""
        try:
            return self._for_epochs(make)
        except TensorsKept:
            if self.gathers:
                raise
            self.gathers = True
            try:
                return self._for_epochs(make)
            except TensorsKept:
                self.gathers = False  # something else keeps them
                raise

    def _for_epochs(self, make: Callable[[], Made]) -> Made:
        """Trace it for any epoch, or for the present one if `reads_epoch`."""
        if self.reads_epoch:
            return make()
        try:
            return make()
        except (EpochUsed, TracesDiffer) as error:
            self.reads_epoch = True
            try:
                return make()
            except TracesDiffer:
                self.reads_epoch = False  # something else differs
                raise error from None
