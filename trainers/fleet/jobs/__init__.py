"""One job: its thread, its dice, its seat, and what its Trainer is given.

`seat.py` is what a job's program sees of the fleet; `lightning_job.py` is the program of a
LightningModule.

May import: atomic_checkpoint, dice, fleet.deciding, fleet.inputs, lightning_seams, loaders,
    loaders.stats, loaders.workers, offload, offload.errors, offload.graph, offload.memory,
    offload.planning, offload.running, offload.sizes, offloading, steps,
    read_checkpoint, torch_seams.
"""
