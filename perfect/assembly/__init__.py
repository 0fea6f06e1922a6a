"""Builds the objects of a run from its configuration. No other folder branches on a configuration.

    RunConfig -> data: Data (train, hold-out, test) -> phases: PhaseSwitch -> run: module, Trainer

May import: callbacks, config, errors, loaders, loaders.adopting, loaders.backends, loaders.errors,
    loaders.order, loaders.pipeline, loaders.pixels, loaders.sharing, loaders.sources, method,
    models, offload, offload.running.drivers, offload.sizes, runs, text, trainers,
    trainers.atomic_checkpoint, trainers.elastic, trainers.elastic.peer, trainers.elastic.wire,
    trainers.fleet.jobs.
"""
