"""Several samples at once, of a data set that has `__getitems__`, as a DataLoader reads them."""

import logging
from collections.abc import Callable, Iterable, Sequence

from loaders.errors import LoaderError
from loaders.slots.leaves import Sample

log = logging.getLogger(__name__)

Many = Callable[[list[int]], Iterable[Sample]]


def read_at_once(many: Many | None, ids: Sequence[int]) -> list[Sample] | None:
    """The samples. None: they are to be read singly, so that whatever fails has its id."""
    if many is None or len(ids) < 2:
        return None
    try:
        together = list(many(list(ids)))
    except Exception:
        log.debug("%d samples could not be read at once, so they are read singly", len(ids))
        return None
    if len(together) != len(ids):
        whose = type(getattr(many, "__self__", many)).__name__
        raise LoaderError(
            f"__getitems__ of {whose} gave {len(together)} samples for {len(ids)} ids: let it give"
            " one for each, in their order, or leave it out"
        )
    return together
