"""One generation's group of members, and what they reduce and gather in it.

    form_group --> Group --> reduce_in_order   sums of one flat tensor, added in the order of ranks
                         --> all_gather_bytes  headers and votes
                         --> abandon           to the Graveyard, which ends it on its own thread

Every wait polls, and calls `alive()`, which raises when the generation has ended.

May import: elastic, torch_seams.
"""

from trainers.elastic.reducing.canonical import reduce_in_order, sum_in_order
from trainers.elastic.reducing.exact import FixedPoint
from trainers.elastic.reducing.exchange import all_gather_bytes
from trainers.elastic.reducing.graveyard import Graveyard
from trainers.elastic.reducing.group import (
    TRANSFER_SECONDS,
    Group,
    GroupPlace,
    Rendezvous,
    form_group,
)
from trainers.elastic.reducing.reducing_errors import (
    FixedPointError,
    FrameError,
    GroupBroken,
    ReducingError,
)
from trainers.elastic.reducing.waiting import wait

__all__ = [
    "TRANSFER_SECONDS",
    "FixedPoint",
    "FixedPointError",
    "FrameError",
    "Graveyard",
    "Group",
    "GroupBroken",
    "GroupPlace",
    "ReducingError",
    "Rendezvous",
    "all_gather_bytes",
    "form_group",
    "reduce_in_order",
    "sum_in_order",
    "wait",
]
