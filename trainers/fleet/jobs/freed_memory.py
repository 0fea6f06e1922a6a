"""Gives memory that was freed back to the machine.

glibc keeps what a thread has freed for that thread, and every job has a thread of its own: what one
job leaves after its start would never be another's.

    malloc_trim        frees the pages of all holes between blocks, in the memory of every thread
    a free of a block  frees what lies above the last block, of the calling thread only, if that is
                       more than the trim threshold

So both are done by the job's own thread. The threshold is high between two hand-overs, because a
step takes and frees the same memory again and again.
"""

import sys
from ctypes import CDLL, c_size_t, c_void_p

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""
MOST = 32 * 2**20
"""The largest threshold to which glibc would raise a block's size by itself; tensors below it are
taken from the thread's memory, larger ones from the system."""
CONSOLIDATES = 128 * 2**10
"""Only the free of a large block has glibc look at what lies above the last one."""


def give_freed_memory_back() -> None:
    """Ask the allocator for what this thread has freed. Where there is no such call, memory stays
    as it is."""
    libc = CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "malloc_trim"):
        return
    libc.malloc.restype, libc.malloc.argtypes = c_void_p, [c_size_t]
    libc.free.restype, libc.free.argtypes = None, [c_void_p]
    libc.mallopt(M_MMAP_THRESHOLD, MOST)
    libc.mallopt(M_TRIM_THRESHOLD, 0)
    libc.free(libc.malloc(CONSOLIDATES))
    libc.malloc_trim(0)
    libc.mallopt(M_TRIM_THRESHOLD, 2 * MOST)
