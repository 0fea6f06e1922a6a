"""A peer's lanes and its update in live steps within a byte budget; the bits are plain Lightning's.

May import: elastic, elastic.commits, elastic.deciding, elastic.working, loaders.lanes, offload,
    offload.graph, offload.live, offload.torch_seams, steps.
"""
