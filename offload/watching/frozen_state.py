"""Makes a `WatchedState` of the holders that a capture has noted.

What the trace made itself and is dead now is left out; so is what held a stand-in.
"""

import sys
from array import array
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from offload.watching.holders import Holder, Items, One
from offload.watching.value_kinds import has_stand_in
from offload.watching.watched_state import Place, WatchedState, WatchedValues

OURS = 2
"""Python counts so many references to what nobody but a holder has."""


def frozen(holders: dict[Any, Holder], ignored: Collection[Place]) -> WatchedState:
    """Return what these holders hold now, without the places that are ignored."""
    for key, holder in list(holders.items()):
        if any(map(has_stand_in, holder.first.values())):
            del holders[key]
    drop_dead(holders)
    dicts: list[WatchedValues] = []
    lists: list[WatchedValues] = []
    others: list[tuple[Callable[[], Mapping[Any, Any]], WatchedValues]] = []
    empty: list[Items] = []
    for holder in holders.values():
        watched = holder.watched()
        if isinstance(holder, One) or isinstance(holder.own, np.ndarray | array | bytearray):
            others.append((holder.now, watched))
        elif isinstance(holder, Items) and not len(holder.own):
            empty.append(holder)
        elif isinstance(holder, Items) and not isinstance(holder.own, dict):
            lists.append(watched)
        elif watched.keys:
            dicts.append(watched)
        holder.first = dict.fromkeys(holder.first)  # what was before the trace may go
    return WatchedState(
        tuple(dicts),
        tuple(lists),
        tuple(others),
        tuple(holder.own for holder in empty),
        tuple(holder.say(None) for holder in empty),
    ).without(ignored)


def drop_dead(holders: dict[Any, Holder]) -> None:
    """Forget the holders that nobody else has any more."""
    dead = True
    while dead:  # what is dead may have been the last to hold something else
        dead = [
            key
            for key, holder in holders.items()
            if type(holder.own) is not MappingProxyType and sys.getrefcount(holder.own) <= OURS
        ]
        for key in dead:
            del holders[key]
