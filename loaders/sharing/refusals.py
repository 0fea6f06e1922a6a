"""What a shared stream refuses, and what it says to views that ask after its end or wait."""

from collections.abc import Sequence
from typing import Any

from loaders.errors import PassEnded, SharingError
from loaders.loader import ReuseLoader
from loaders.sharing.follower import Follower


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


def pieces_for(loader: ReuseLoader, size: int, wanted: int | None) -> int:
    """Into how many pieces batches of `size` are cut for a view of `wanted`. None: whole ones."""
    wanted = size if wanted is None else wanted
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


def check_other_thread(
    follower: Follower, names: tuple[str, ...], present: Sequence[Follower], window: int
) -> None:
    """Refuse to wait for a view that only the waiting thread itself could read."""
    same = [one.name for one in present if one.thread == follower.thread]
    if mine := [name for name in names if name in same]:
        raise SharingError(
            f"{follower.name} is {window} batches ahead of {mine[0]}, and one thread reads"
            f" both, so it would wait for itself: take batches from {mine[0]} first, close it,"
            " or raise window"
        )


def describe_wait(name: str, names: tuple[str, ...], seconds: float, window: int) -> str:
    """Say who has waited for whom."""
    return (
        f"{name} has waited {seconds:.0f} s for {', '.join(names)}, which is"
        f" {window} batches behind: take its batches, close it, or raise window"
    )


def stream_ended(why: str) -> PassEnded:
    """Return the error of a view that asks for a batch after the end."""
    return PassEnded(
        f"{why}: nothing is lost, state_dict() of a view says where it stands; make a"
        " new SharedStream, and load the states into its views"
    )
