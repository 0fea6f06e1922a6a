"""The parts of `perfect-train` besides training: the check, the plans, the final accuracy.

May import: assembly, callbacks, config, loaders, loaders.adopting, loaders.order, loaders.slots,
    loaders.sources, offload, offload.memory, offload.sizes, runs, trainers,
    trainers.lightning_seams.
"""
