"""A peer as Lightning sees it: the strategy, the loader of shares, and what is refused.

May import: atomic_checkpoint, elastic, elastic.commits, elastic.deciding, elastic.giving,
    elastic.membership, elastic.planned, elastic.reducing, elastic.replaying, elastic.swarm,
    elastic.wire, elastic.working, lightning_seams, loaders, loaders.lanes, loaders.order,
    loaders.stats, offload, offloading, one_device.
"""
