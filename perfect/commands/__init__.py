"""The parts of `perfect-train`: training a run, the check, the plans, the final accuracy.

May import: assembly, callbacks, command_line, config, errors, loaders, loaders.cache,
    loaders.order, loaders.slots, offload, offload.estimating, offload.memory, offload.sizes,
    report, runs, trainers, trainers.atomic_checkpoint, trainers.elastic,
    trainers.elastic.deciding, trainers.elastic.peer, trainers.fleet.jobs,
    trainers.folder_lock, trainers.lightning_seams, trainers.offloading, trainers.read_checkpoint.
"""
