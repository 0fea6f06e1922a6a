"""A bar on the terminal for what takes seconds before training, and whose length is known."""

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

log = logging.getLogger(__name__)
Thing = TypeVar("Thing")


def counted(things: Sequence[Thing], what: str) -> Iterable[Thing]:
    """Return the things. While they are taken, a terminal shows how many are left; it does not with
    `perfect-train -q`, nor where several jobs begin at once, in threads of their own."""
    console = Console(stderr=True)
    alone = threading.current_thread() is threading.main_thread()
    if not (alone and console.is_terminal and log.isEnabledFor(logging.WARNING)):
        return things
    return track(things, what, console=console, transient=True)
