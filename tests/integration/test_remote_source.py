"""A stream that reads a view of another process, and goes on by itself where that one cannot."""

import pickle
import re
import sys
from typing import Any

import pytest
from support.loader_datasets import served
from support.shared_streams import BATCH, BATCHES, SIZE, Counted, lone

from loaders import SharedStream
from loaders.sharing.remote_view import RemoteSource
from loaders.sharing.view_link import AHEAD

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="remote views need Linux")


def taken(batch: Any) -> Any:
    return served([batch])[0]


def over(far: SharedStream, data: Counted) -> tuple[SharedStream, RemoteSource]:
    """Return a stream that reads a view of `far`, and whose own data set is `data`."""
    loader = lone(dataset=data)
    view = pickle.loads(pickle.dumps(far.remote_view()))
    source = RemoteSource(loader, lambda: view)
    return SharedStream(loader, window=2 * BATCHES, source=source), source


@pytest.mark.parametrize("ends_after", [0, 1, BATCHES - 1, BATCHES, BATCHES + 2])
def test_a_stream_whose_other_process_ends_goes_on_with_the_next_batch(
    ends_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    data = Counted(SIZE)
    far = SharedStream(lone(), window=2 * BATCHES)
    near, source = over(far, data)
    data.reads.clear()
    with near, lone() as expected:
        first, second = near.view(), near.view()
        found: list[Any] = []
        for number in range(2 * BATCHES):
            if number == ends_after:
                far.close()
            if number % BATCHES == 0:
                iterator = iter(first)
            found.append(next(iterator))
        reference = served(expected) + served(expected)
        assert [taken(batch) for batch in found] == reference
        assert served(second) + served(second) == reference
        assert first.state_dict() | {"stats": None} == expected.state_dict() | {"stats": None}
    assert source.is_remote == (ends_after > 2 * BATCHES)
    said = re.findall(r"pass (\d+) is read in this process from batch (\d+) on", caplog.text)
    ((in_pass, in_batch),) = said
    sent = int(in_pass) * BATCHES + int(in_batch)
    assert ends_after <= sent <= ends_after + AHEAD, "what was sent before the end is served"
    own = 2 * SIZE - sent * BATCH
    assert own <= len(data.reads) <= own + 2 * SIZE, "nothing is decoded twice, some may be ahead"
    far.close()


def test_while_the_other_process_reads_nothing_is_decoded_here() -> None:
    data = Counted(SIZE)
    with SharedStream(lone(), window=BATCHES) as far:
        near, source = over(far, data)
        data.reads.clear()
        with near, lone() as expected:
            view = near.view()
            assert served(view) + served(view) == served(expected) + served(expected)
            assert source.is_remote and not data.reads
            assert view.stats.decoded == expected.stats.decoded


def test_an_error_of_the_data_set_is_raised_as_it_is_here_and_the_pass_can_be_tried_again() -> None:
    broken = Counted(SIZE, bad=(7,))
    with SharedStream(lone(dataset=Counted(SIZE, bad=(7,))), window=BATCHES) as far:
        near, source = over(far, broken)
        with near:
            view = near.view()
            with pytest.raises(OSError, match="sector 7"):
                served(view)
            assert not source.is_remote
            broken.bad = frozenset()
            with lone() as expected:
                assert len(served(view)) == len(served(expected))
