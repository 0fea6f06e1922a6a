"""A peer's lanes and its update as plans within a byte budget, with the bits of plain Lightning.

May import: elastic, elastic.commits, elastic.deciding, elastic.working, offload, offload.graph,
    offload.measuring, offload.optimizer, offload.sizes, offload.torch_seams, offload.tracing,
    offloading.hardware, offloading.steps, offloading.tracing.
"""
