"""Which loaders can be dealt in lanes, and in how many."""

from typing import Any

from loaders.errors import LaneError
from loaders.lanes.lane_order import LanePass
from loaders.loader import ReuseLoader


def check_loader(loader: Any) -> None:
    """Refuse a loader whose lanes would not be the same on every peer, or not known in advance."""
    if not isinstance(loader, ReuseLoader):
        raise TypeError(
            f"LaneLoader deals out a ReuseLoader, not {type(loader).__name__}:"
            " ReuseLoader.from_dataloader(loader) makes one from a DataLoader"
        )
    if loader.state_dict()["stream"] is not None:
        raise LaneError(
            "the loader reads a stream, whose samples cannot be dealt to lanes, because nobody can"
            " ask for them by their numbers: give a data set with len() and [i]"
        )
    if loader.state_dict()["tuner"] is not None:
        raise LaneError(
            'reuse="auto" measures how fast one peer is, but all peers serve the same lanes: give a'
            " number"
        )
    if loader.buffer_bytes is not None:
        raise LaneError(
            f"buffer_bytes={loader.buffer_bytes} decides the order of a lane, but how many lanes a"
            " peer holds changes: leave it out, and give buffer_batches, which counts for each"
        )
    if (device := loader.options.device) is not None:
        raise LaneError(
            f"the loader sends its batches to {device.to}, but whoever takes the"
            " batch of a lane moves it: leave device out"
        )
    if loader.setup.opened.scaled:
        raise LaneError('decode="scaled" has no effect on lanes, whose slots hold whole pictures')
    if loader.order.named is not None:
        raise LaneError(
            f"the sampler {type(loader.order.sampler).__name__} draws the share of one rank, but"
            " lanes share out the order of all: give a sampler that names no rank"
        )


def check_place(loader: ReuseLoader) -> None:
    """Refuse a loader that serves one rank of several by now, or that somebody iterates."""
    if (loader.rank, loader.world_size) != (0, 1):
        raise LaneError(
            f"the loader is that of rank {loader.rank} of {loader.world_size}, but lanes share out"
            " the samples of all: make it with rank=(0, 1)"
        )
    check_alone(loader)


def check_alone(loader: ReuseLoader) -> None:
    if loader.runner.run is not None:
        raise LaneError(
            "a pass of the loader is under way in another iterator: end or close that iterator"
            " before its lanes are served"
        )


def check_pass(of: LanePass) -> None:
    """Refuse a pass in which some lane cannot fill a batch."""
    if of.lanes < 1:
        raise ValueError(f"lanes must be at least 1, not {of.lanes}")
    samples, batch_size = of.whole.samples, of.whole.batch_size
    if of.lanes > samples:
        raise ValueError(
            f"{of.lanes} lanes are more than the data set has samples ({samples}): lower lanes"
        )
    least = of.share(of.lanes - 1)
    if batch_size > least:
        raise ValueError(
            f"batch_size {batch_size} is larger than a lane's share of the data set ({least} of"
            f" {samples} samples on {of.lanes} lanes): lower batch_size or lanes"
        )
