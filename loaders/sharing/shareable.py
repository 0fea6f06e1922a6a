"""Which loaders can be shared, and by views of which batch sizes."""

from typing import Any

from loaders.errors import SharingError
from loaders.loader import ReuseLoader


def check_loader(loader: Any) -> None:
    """Refuse what a shared stream could not serve to each view as a lone loader would."""
    if not isinstance(loader, ReuseLoader):
        raise TypeError(
            f"SharedStream shares a ReuseLoader, not {type(loader).__name__}:"
            " ReuseLoader.from_dataloader(loader) makes one from a DataLoader"
        )
    if loader.state_dict()["stream"] is not None:
        raise SharingError(
            "the loader reads a stream, whose passes cannot be read by several at different places:"
            " give each consumer a loader of its own"
        )
    if loader.state_dict()["tuner"] is not None:
        raise SharingError(
            'reuse="auto" measures one training loop, but a shared stream has several: give a'
            " number"
        )
    device = loader.options.device
    if device is not None and str(device.to) != "cpu":
        raise SharingError(
            f"the loader sends its batches to {device.to}, but those of a shared stream wait on the"
            " host: leave device out, and let each consumer move its own batches"
        )


def pieces_for(loader: ReuseLoader, size: int, wanted: int) -> int:
    """Return into how many pieces batches of `size` samples are cut for a view of `wanted`."""
    if wanted < 1 or size % wanted:
        fits = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise SharingError(
            f"batch_size {wanted} does not divide {size}, the batch size of the shared loader: give"
            f" one of {fits}"
        )
    if size != wanted and loader.options.collate is not None:
        raise SharingError(
            f"the shared loader has a collate function, whose batches of {size} cannot be cut into"
            f" batches of {wanted}: leave batch_size out, or share a loader with"
            f" batch_size={wanted}"
        )
    return size // wanted
