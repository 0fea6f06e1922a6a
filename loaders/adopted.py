"""The arguments of `ReuseLoader` that a DataLoader gives, and what to say of them.

seed      its DistributedSampler's; else drawn from its generator, as DataLoader draws from it
workers   as many as it has; none, and code of a user's own: the loop's own thread reads
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from torch.utils.data import DataLoader, IterableDataset

from loaders.adopting.adoption import from_dataloader
from loaders.adopting.native_folder import Decoding, ScaledDecoding
from loaders.checks import one_of
from loaders.options import Workers


@dataclass(frozen=True, slots=True)
class AdoptedArguments:
    """What `ReuseLoader` takes over from a DataLoader."""

    arguments: dict[str, Any]
    seed_from: str
    """Where the seed comes from. Empty: it was given, or `ReuseLoader` draws it."""
    notes: tuple[str, ...]
    """What has no effect, or is otherwise than with the DataLoader."""
    batches: int | None
    """How many batches an epoch of the DataLoader has. None: nobody knows."""

    def served_in(self, batches: Callable[[], int], reuse: int) -> "AdoptedArguments":
        """The same, which says that a pass with reuse has more batches than an epoch had."""
        if reuse == 1 or self.batches is None:
            return self
        longer = (
            f"{batches()} batches a pass (DataLoader: {self.batches}): divide max_epochs and"
            f" schedules by epoch by {reuse}"
        )
        return replace(self, notes=(*self.notes, longer))


def adopted_arguments(
    dataloader: DataLoader[Any], changes: Mapping[str, Any], reuse: int | str
) -> AdoptedArguments:
    """`changes` are arguments that were given beside the DataLoader, and replace what it says; and
    "decode", which says whether JPEGs may be decoded smaller (see `native_folder`)."""
    changes = dict(changes)
    one_of("decode", decode := changes.pop("decode", "exact"), get_args(Decoding))
    splits = changes.get("augment") is None and changes.get("once") is None
    adopted = from_dataloader(dataloader, splits, reuse == 1)
    given = adopted.arguments()
    if decode == "scaled":
        given["dataset"] = ScaledDecoding(dataloader.dataset)
    generator = getattr(dataloader.sampler, "generator", None) or dataloader.generator
    seed_from = ""
    if "seed" in given:
        seed_from = f"of its {type(dataloader.sampler).__name__}"
    elif generator is not None:
        given["seed"], seed_from = generator, "drawn from its generator"
    seed_from = "" if "seed" in changes else seed_from
    listed = not isinstance(dataloader.dataset, IterableDataset) and reuse != 1
    batches = len(dataloader) if listed else None
    method = cast(Any, adopted.start_method)
    workers = Workers(adopted.workers, "auto", method, adopted.timeout, adopted.worker_init_fn)
    workers = workers.changed_by(changes.get("workers", Workers()))
    arguments = {**given, **changes, "workers": workers}
    return AdoptedArguments(arguments, seed_from, adopted.notes, batches)
