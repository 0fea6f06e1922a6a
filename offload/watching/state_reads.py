"""Notes which Python values a traced step reads and writes, wherever they are kept.

    trace 1    every read and write is noted, with what was there before
    trace 2    what changes again is what the step does in every call
    then       state(): all that was noted, to be compared before every step

Not seen: state inside C extensions, calls of `object.__getattribute__`, wall clocks.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from offload.gate import only_python
from offload.torch_seams import GLOBAL_HOOKS
from offload.watching.executed_code import calls_noted
from offload.watching.frozen_state import drop_dead, frozen
from offload.watching.holders import Items
from offload.watching.value_kinds import has_stand_in, is_of_ours, why_kept
from offload.watching.value_search import ValueSearch
from offload.watching.watched_state import MISSING, Place, WatchedState, alike, brief


class StateReads:
    """The places that one step reads and writes, over both its traces."""

    def __init__(self) -> None:
        self._search = ValueSearch()
        self._ignored: set[Place] = set()
        self._traced = False

    @property
    def too_large(self) -> list[str]:
        """Containers that are not watched, because they are too large."""
        return self._search.too_large

    @contextmanager
    def noting(self, things: Mapping[str, Any]) -> Iterator[None]:
        """Note what the step reads and writes in this block. `things` are where it begins."""
        for number, hooks in enumerate(GLOBAL_HOOKS):
            self._search.meet(hooks, f"torch's global hooks {number}")
        for name, thing in things.items():
            self._search.meet(thing, name or type(thing).__name__)
            for path, part in thing.named_modules() if isinstance(thing, torch.nn.Module) else ():
                self._search.meet(part, f"{name}.{path}".strip(".") or type(thing).__name__)
        collecting = gc.isenabled()
        gc.disable()  # callbacks of the collector are no part of the step
        self._search.spies.put()
        try:
            if self._traced:
                yield
            else:
                with calls_noted(self._search.meet_code):
                    yield
        finally:
            self._traced = True
            self._search.spies.remove()
            if collecting:
                gc.enable()
        with only_python():
            self._search.meet_closures()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing in this block: no code of the user runs in it."""
        before, self._search.spies.noting = self._search.spies.noting, False
        try:
            yield
        finally:
            self._search.spies.noting = before

    def ignore(self, own: Any, key: Any) -> None:
        """Do not watch this place: whoever calls knows that it may change."""
        self._ignored.add((id(own), key))
        self._search.keep(own)

    def add(self, own: dict[str, Any], name: str, label: str) -> None:
        """Watch a name of a dict that the step reads in a way that no spy sees."""
        self._search.names(own, label).note(name)
        self._search.meet(own.get(name), f"{label}.{name}")

    def present(self) -> dict[Any, Mapping[Any, Any]]:
        """Return what all noted places hold now."""
        return {key: holder.now() for key, holder in self._search.holders.items()}

    def left_behind(self) -> str:
        """Say what the trace left in the user's objects that is no value; empty if nothing."""
        for holder in self._search.holders.values():
            for key, value in holder.now().items():
                for kept in (key, value):
                    if value is not holder.first.get(key, MISSING) and has_stand_in(kept):
                        where = holder.say(None if kept is key else key)
                        return f"{where} keeps {why_kept(kept)}"
        return ""

    def changed_since(self, before: Mapping[Any, Mapping[Any, Any]]) -> str:
        """Say which place has changed since `present()` returned `before`; empty if none has. No
        trace follows."""
        self._search.forget()
        drop_dead(self._search.holders)
        found = self._change(before)
        if found and found[0] not in before:  # it may be of the trace, and in a circle
            gc.collect()
            drop_dead(self._search.holders)
            found = self._change(before)
        if found:
            number, key, old, new = found
            label = self._search.holders[number].say(key)
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                return (
                    f"{label} becomes another tensor in a call, and a captured step keeps the"
                    " first. Write into it in place, with copy_()"
                )
            return (
                f"{label} changes from {brief(old)} to {brief(new)} in a call, and a captured step"
                " runs no python. Keep it in a tensor (a buffer), or change it outside of the step"
            )
        for dice in self._search.dice:
            if dice.drawn:
                return (
                    f"the step draws from {dice.label}, and every step would use the number drawn"
                    " now. Draw with torch, or pass the number in as a tensor of the batch"
                )
        return ""

    def _change(self, before: Mapping[Any, Mapping[Any, Any]]) -> tuple[Any, Any, Any, Any] | None:
        for number, holder in self._search.holders.items():
            then, now = before.get(number, holder.first), holder.now()
            if not isinstance(holder, Items):  # names that only the second trace has read
                then = {**holder.first, **then}
            for key in {**then, **now}:
                old, new = then.get(key, MISSING), now.get(key, MISSING)
                if not (old is new or alike(old, new) or is_of_ours(old) or is_of_ours(new)):
                    return number, key, old, new
        return None

    def put_back(self) -> None:
        """Undo all that the traces changed in Python."""
        for holder in self._search.holders.values():
            holder.put_back()
        for dice in self._search.dice:
            dice.put_back()

    def state(self) -> WatchedState:
        """Return all that was noted, with the values of now."""
        self._search.forget()
        return frozen(self._search.holders, self._ignored)
