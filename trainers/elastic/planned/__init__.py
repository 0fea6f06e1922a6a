"""A peer's lanes and its update in live steps within a byte budget; the bits are plain Lightning's.

May import: elastic, elastic.commits, elastic.working, offload, offload.live, offloading,
    offloading.hardware, offloading.steps.
"""
