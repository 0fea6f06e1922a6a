"""What consumers of remote views do in processes of their own. A spawned one imports this file."""

import time
from multiprocessing.connection import Connection
from typing import Any

from support.shared_streams import lone, passes

from loaders import SharedStream


def consume(view: Any, number: int, pause: float, pipe: Connection) -> None:
    """Take some passes, at a pace, and tell what was in them."""
    taken = []
    with view:
        for _ in range(number):
            for pictures, ids in view:
                taken.append((tuple(ids.tolist()), pictures.numpy().tobytes()))
                pictures.zero_()  # a batch is its consumer's own
                time.sleep(pause)
        pipe.send((taken, view.state_dict()))


def take_and_stay(view: Any, batches: int, pipe: Connection) -> None:
    """Take some batches, tell it, and do nothing any more."""
    for number, _ in enumerate(view, 1):
        if number == batches:
            pipe.send("taken")
            time.sleep(600)


def share(pipe: Connection) -> None:
    """Have a stream, and wait for an end by force. A process that was forked later inherits it."""
    with SharedStream(lone()) as stream:
        view = stream.remote_view(name="far")
        pipe.send(view)
        pipe.recv()
        import multiprocessing

        child = multiprocessing.get_context("fork").Process(
            target=take_and_stay, args=(stream.remote_view(), 1, pipe)
        )
        child.start()
        pipe.send(child.pid)
        time.sleep(600)


__all__ = ["consume", "passes", "share", "take_and_stay"]
