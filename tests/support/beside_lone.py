"""A view of a shared stream and a lone loader, to which the same is done."""

import json
from collections import deque
from collections.abc import Generator
from itertools import takewhile
from typing import Any

import torch
from support.numbered_samples import loader

from loaders.sharing.shared_view import SharedView

Batch = tuple[tuple[int, ...], tuple[int, ...], bytes]


def nothing() -> Generator[Any]:
    yield from ()


def passes(loader: Any) -> Generator[Any]:
    """One pass of a loader: its own iterator, which can be closed."""
    iterator = iter(loader)
    assert isinstance(iterator, Generator)
    return iterator


class Beside:
    """A view, and a lone loader that does what is done to the view."""

    def __init__(self, view: SharedView, options: dict[str, Any]) -> None:
        self.view, self.lone, self.cut = view, loader(**options), view.pieces
        self.lone.load_state_dict(self.lone_state())
        self.mine: Generator[Any] = nothing()
        self.theirs: Generator[Any] = nothing()
        self.pieces: deque[Batch] = deque()
        """What the view still has to give of the batch that the lone loader gave."""
        self.left: tuple[Any, int] | None = None
        """The lone loader's state before a batch, and how much of it was left."""
        self.view_resumes_with = 0
        """The view goes on with so many last pieces of the next batch. 0: with all of them."""
        self.saved: tuple[Any, Any, int] | None = None

    def lone_state(self) -> dict[str, Any]:
        """The state of a new view as that of a lone loader."""
        state = self.view.state_dict()
        if state.pop("pieces", 1) > 1:
            self.lone.load_state_dict(state | {"served_batches": 1})
            counts = (self.pieces_of_a_pass(batches) for batches in range(999))
            whole = [*takewhile(state["served_batches"].__ge__, counts)]
            state["served_batches"] = len(whole) - 1
        return state

    def take(self) -> None:
        """Take a batch of both, of the next pass where one has ended."""
        if (taken := next(self.mine, None)) is None:
            assert not self.pieces
            assert next(self.theirs, None) is None
            assert len(self.view) == self.pieces_of_a_pass()
            self.mine, self.theirs = passes(self.view), passes(self.lone)
            taken = next(self.mine)
        picture, ids = taken
        info = self.view.last_batch
        assert info is not None
        assert info.ids.tolist() == ids.tolist()
        got = (tuple(ids.tolist()), tuple(info.serves.tolist()), picture.numpy().tobytes())
        assert got == self.expected()
        picture.zero_()  # a batch is its consumer's own
        self.left = None
        if not self.pieces:
            self.check_states()

    def expected(self) -> Batch:
        if not self.pieces:
            self.before = self.lone.state_dict()
            picture, ids = next(self.theirs)
            info = self.lone.last_batch
            assert info is not None
            size = self.lone.position.running.batch_size // self.cut
            parts = picture.split(size), ids.split(size), torch.tensor(info.serves).split(size)
            for pixels, numbers, serves in zip(*parts, strict=True):
                told = tuple(numbers.tolist()), tuple(serves.tolist()), pixels.numpy().tobytes()
                self.pieces.append(told)
            if self.view_resumes_with:
                while len(self.pieces) > self.view_resumes_with:
                    self.pieces.popleft()
                self.view_resumes_with = 0
        return self.pieces.popleft()

    def pieces_of_a_pass(self, batches: int | None = None) -> int:
        """Count the pieces of the pass that comes next, batch by batch; or of the running one's
        first `batches` batches."""
        at, share = self.lone.position, self.lone.share
        serving = at.serving if batches is None else at.running
        part, rows = serving.batch_size // self.cut, serving.batch_size
        items = share if self.lone.mode == "immediate" else share * serving.reuse
        sizes = [min(rows, items - at) for at in range(0, items, rows)]
        if self.lone.mode == "immediate":
            sizes = [size for size in sizes for _ in range(serving.reuse)]
        sizes = [size for size in sizes if size == rows or not self.lone.drop_last]
        return sum(-(-size // part) for size in sizes[:batches])

    def check_states(self) -> None:
        mine, theirs = self.view.state_dict(), self.lone.state_dict()
        assert mine.pop("pieces", 1) == self.cut
        theirs["served_batches"] = self.pieces_of_a_pass(theirs["served_batches"])
        for name in ("decoded", "cached", "reused", "served", "serves", "mean_age"):
            # A state has no more of the pass that a view joined in its middle than a lone loader
            # that loads it, so both have counted the same.
            assert mine["stats"][name] == theirs["stats"][name], name
        assert {**mine, "stats": 0} == {**theirs, "stats": 0}

    def leave(self) -> None:
        """Leave the pass in its middle."""
        self.left = (self.before, len(self.pieces)) if self.pieces else self.left
        self.mine.close()
        self.theirs.close()
        self.mine, self.theirs = nothing(), nothing()
        self.pieces.clear()

    def save(self) -> None:
        under_way = (self.before, len(self.pieces)) if self.pieces else self.left
        mine = json.loads(json.dumps(self.view.state_dict()))
        theirs, left = under_way or (self.lone.state_dict(), 0)
        self.saved = (mine, theirs, left)

    def resume(self) -> None:
        """Go back to where both were saved."""
        if self.saved is None:
            return
        mine, theirs, left = self.saved
        self.left, self.view_resumes_with = ((theirs, left) if left else None), left
        self.view.load_state_dict(mine)
        self.lone.load_state_dict(theirs)
        self.pieces.clear()
        self.mine, self.theirs = passes(self.view), passes(self.lone)

    def end(self) -> None:
        self.view.close()
        self.lone.close()
