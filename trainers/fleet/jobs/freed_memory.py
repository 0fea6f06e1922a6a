"""Gives memory that was freed back to the machine.

glibc keeps what a thread has freed for that thread, and every job has a thread of its own: what one
job leaves after its start would never be another's.
"""

import sys
from ctypes import CDLL


def give_freed_memory_back() -> None:
    """Ask the allocator for it. Where there is no such call, memory stays as it is."""
    trim = getattr(CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
