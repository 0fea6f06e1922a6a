"""One job: its thread, its turns, and what its program and its Trainer get.

May import: atomic_checkpoint, fleet.deciding, fleet.inputs, lightning_seams, loaders.stats,
    loaders.workers, offload, offload.errors, offload.memory, offload.planning, offload.running,
    offload.sizes, offloading, random_state, read_checkpoint, steps.
"""
