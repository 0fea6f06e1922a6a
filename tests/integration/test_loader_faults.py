"""What goes wrong between a file and a batch reaches the consumer, and leaves no thread."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.numbered_samples import Made, in_threads
from torch.utils.data import IterableDataset

from loaders import Workers
from loaders.errors import DecodeError, LoaderError, SampleShapeError, SourceError


def numbers(size: int, read: Callable[[int], Any] = torch.tensor) -> Made:
    """Sample i is i, unless `read` does something else."""
    return Made(size, read)


def decode_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("perfect-")]


def notes(error: BaseException) -> str:
    return "; ".join(getattr(error, "__notes__", []))


# ---- a sample that cannot be read ---------------------------------------------------------------


class Unreadable(Exception):
    """Nobody of ours raises this."""


@pytest.mark.parametrize("workers", [1, 3])
def test_a_failure_arrives_as_it_was_raised_with_the_sample_that_it_came_from(workers: int) -> None:
    raised = Unreadable("sector 7")

    def read(i: int) -> torch.Tensor:
        if i == 13:
            raise raised
        return torch.tensor(i)

    loader = in_threads(numbers(20, read), 4, 1, shuffle=False, workers=workers)
    with pytest.raises(Unreadable) as error:
        list(loader)
    assert error.value is raised
    assert "decoding sample 13 of pass 0" in notes(raised)
    assert not decode_threads()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_stop_iteration_of_a_sample_does_not_end_the_pass_in_silence(kind: Any) -> None:
    def read(i: int) -> torch.Tensor:
        if i == 6:
            raise StopIteration("sector 7")
        return torch.tensor(i)

    loader = in_threads(numbers(8, read), 4, 2, workers=Workers(1, kind), reaugment=False)
    said = r"sample 6 raised StopIteration\('sector 7'\)"
    with loader, pytest.raises(DecodeError, match=said):
        list(loader)


def test_after_a_failure_the_loader_can_be_iterated_again() -> None:
    broken = [True]

    def read(i: int) -> torch.Tensor:
        # Sample 6 is none of those that are read when the loader is made (test_read_check).
        if i == 6 and broken.pop() if broken else False:
            raise Unreadable
        return torch.tensor(i)

    loader = in_threads(numbers(8, read), 4, 2, shuffle=False, workers=1)
    with pytest.raises(Unreadable):
        list(loader)
    assert sorted(i for batch in loader for i in batch.tolist()) == sorted([*range(8)] * 2)


def test_a_transform_that_fails_is_the_consumers_failure_and_leaves_no_thread() -> None:
    def fail(images: torch.Tensor, draws: object) -> torch.Tensor:
        raise Unreadable

    pictures = numbers(8, lambda i: torch.zeros(3, 4, 4))
    with pytest.raises(Unreadable):
        list(in_threads(pictures, 4, 1, augment=fail, workers=2))
    assert not decode_threads()


def test_an_augmentation_without_pictures_is_refused() -> None:
    with pytest.raises(LoaderError, match="no picture to augment"):
        list(in_threads(numbers(8), 4, 1, augment=lambda images, draws: images, workers=1))


# ---- samples that do not fit --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "complaint"),
    [
        (torch.zeros(3, 4, dtype=torch.int64), "part 0 of sample 6 is torch.int64.*torch.float32"),
        ("a word", "part 0 of sample 6 is str"),
        ((torch.zeros(3, 4), 1), "sample 6 is nested otherwise than the first one"),
    ],
    ids=["type", "word", "structure"],
)
def test_a_sample_unlike_the_first_is_refused_with_both_their_shapes(
    odd: Any, complaint: str
) -> None:
    samples = numbers(8, lambda i: odd if i == 6 else torch.zeros(3, 4))
    with pytest.raises(SampleShapeError, match=complaint) as error:
        list(in_threads(samples, 4, 2, shuffle=False, workers=2))
    assert "sample 6 of pass 0" in notes(error.value)
    assert not decode_threads()


# ---- wrong arguments ----------------------------------------------------------------------------


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"reuse": 0}, ValueError, "reuse must be at least 1, not 0"),
        ({"reuse": -2}, ValueError, "reuse must be at least 1, not -2"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, not 0"),
        (
            {"batch_size": 9, "drop_last": True},
            ValueError,
            r"batch_size 9 is larger than what a rank serves in a pass \(samples: 8\), and",
        ),
        ({"buffer_batches": 0}, ValueError, "buffer_batches must be at least 1, not 0"),
        ({"workers": -1}, ValueError, "workers must be a whole number from 0 on, .* not -1"),
        ({"mode": "roling"}, ValueError, "mode must be one of rolling, block, immediate"),
        ({"dataset": Endless(), "sampler": [0]}, ValueError, "sampler does not go with a stream"),
        ({"rank": 1}, ValueError, "rank must be a rank and the number of ranks, such as .*not 1"),
        ({"rank": (2, 2)}, ValueError, "such as .0, 2., not .2, 2."),
        ({"dataset": 7}, TypeError, "map-style data set.*not int"),
        ({"dataset": []}, SourceError, "data set is empty"),
    ],
)
def test_a_wrong_argument_is_refused_at_once_with_its_value(
    options: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        in_threads(**{"dataset": numbers(8), "batch_size": 4, "reuse": 2, **options})


def test_a_refused_change_of_reuse_changes_nothing() -> None:
    loader = in_threads(numbers(8), 4, 2, shuffle=False, workers=1)
    with pytest.raises(ValueError, match="reuse must be"):
        loader.set_reuse(0, batch_size=2)
    assert (loader.reuse, loader.batch_size, len(loader)) == (2, 4, 4)


# ---- threads ------------------------------------------------------------------------------------


def test_after_a_whole_pass_the_workers_fill_the_buffer_for_the_next_and_end() -> None:
    loader = in_threads(numbers(20), 4, 2, workers=3)
    for _ in loader:
        pass
    for thread in decode_threads():
        thread.join(60)
    assert not decode_threads()


def test_nothing_starts_before_the_first_batch_is_asked_for() -> None:
    iterator = iter(in_threads(numbers(20), 4, 2, workers=3))
    assert not decode_threads()
    next(iterator)
    assert len(decode_threads()) > 0
    iterator.close()
