"""A peer of a swarm: its Lightning strategies, its link to the anchor, and how it trains, gives its
state to newcomers, logs its steps and replays logs.

May import: atomic_checkpoint, elastic, elastic.anchor, elastic.deciding, elastic.reducing,
    elastic.wire, elastic.work, lightning_seams, loaders, loaders.lanes, loaders.order,
    loaders.stats, offload, offloading, one_device, plain_values, record_file.
"""
