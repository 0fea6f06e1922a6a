"""Any plan of a pass, and what it serves."""

from collections.abc import Sequence

from hypothesis import strategies as st

from loaders.order.reuse import MODES, Mode, ReuseBuffer
from loaders.order.serve import Serve


def pairs(serve: Serve) -> list[tuple[int, int]]:
    """(position, serve) of each sample of a batch."""
    return list(zip(serve.positions.tolist(), serve.serves.tolist(), strict=True))


@st.composite
def plans(
    draw: st.DrawFn, modes: Sequence[Mode] = MODES, min_buffer: int = 1, full: bool = True
) -> ReuseBuffer:
    """Any pass over at least one batch, or (`full=False`) one sample; it may have a remainder, or
    be much longer than its buffer."""
    batch_size = draw(st.integers(1, 9))
    buffer_batches = draw(st.integers(min_buffer, 5))
    least = batch_size if full else 1
    samples = draw(
        st.integers(least, 2 * batch_size)
        | st.integers(least, 3 * batch_size * buffer_batches + 7)
        | st.integers(least, 12 * batch_size * buffer_batches)
    )
    return ReuseBuffer(
        samples=samples,
        batch_size=batch_size,
        reuse=draw(st.integers(1, 8)),
        buffer_batches=buffer_batches,
        mode=draw(st.sampled_from(modes)),
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        seed=(draw(st.integers(0, 2**40)), draw(st.integers(0, 3))),
    )
