"""Samples that come one after the other, and cannot be asked for by their number.

    TarShards         tars, here or by a URL      a place is (shard, byte), and found at once
    IterableSamples   anything that is iterated   a place is the data set's state, if it has one

May import: errors, order, pixels, slots, sources, workers.
"""

from loaders.streams.iterable_samples import IterableSamples
from loaders.streams.tar_shards import TarShards

__all__ = ["IterableSamples", "TarShards"]
