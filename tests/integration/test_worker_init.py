"""Workers(init=): called in each worker process, as torch's workers do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import loader_datasets as data
from torch.utils.data import DataLoader

from loaders import ReuseLoader, Workers
from loaders.errors import SourceError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_it_is_called_with_the_workers_number_and_may_change_the_data_set(method: Any) -> None:
    workers, told = Workers(3, "process", method, init=data.tell_data_set), data.ToldByInit(24)
    with ReuseLoader(told, 4, reuse=1, workers=workers) as loader:
        rows = [
            row for batch in loader for row in zip(*(c.tolist() for c in batch[1:]), strict=True)
        ]
    assert sorted(index for index, _, _ in rows) == list(range(24))
    assert all(said == 30 + number and 0 <= number < 3 for _, said, number in rows)
    assert told.told == -1  # the one here is another one


def test_a_process_that_was_replaced_calls_it_too(tmp_path: Path) -> None:
    killed = data.Killed(16, 5, 1, tmp_path / "killed")
    workers = Workers(1, "process", init=data.tell_data_set)
    with ReuseLoader(killed, 4, reuse=1, workers=workers) as loader:
        assert sorted(i for batch in loader for i in batch[1].tolist()) == list(range(16))


def test_draws_of_samples_do_not_depend_on_it() -> None:
    def drawn(init: Any) -> list[Any]:
        workers = Workers(2, "process", init=init)
        with ReuseLoader(data.Drawing(16), 4, reuse=1, workers=workers) as loader:
            return [*loader]

    for mine, other in zip(drawn(None), drawn(data.reseed), strict=True):
        assert all(map(torch.equal, mine, other))


def test_its_error_is_raised_as_it_is() -> None:
    workers = Workers(1, "process", init=data.fail_to_begin)
    loader = ReuseLoader(data.Pictures(8), 4, reuse=1, workers=workers)
    with loader, pytest.raises(RuntimeError, match="no licence for worker 0") as error:
        next(iter(loader))
    assert "while init was called with 0" in str(error.value)


def test_it_is_taken_over_from_a_dataloader_with_its_processes() -> None:
    theirs = DataLoader(
        data.ToldByInit(8), 4, num_workers=2, worker_init_fn=data.tell_data_set, timeout=60
    )
    with ReuseLoader.from_dataloader(theirs, reuse=1) as loader:
        assert {said for batch in loader for said in batch[2].tolist()} <= {20, 21}


def test_what_cannot_be_sent_to_a_fork_server_is_refused() -> None:
    workers = Workers(1, start_method="forkserver", init=lambda _: None)
    loader = ReuseLoader(data.Pictures(8), 4, reuse=1, workers=workers)
    said = r"init=<function .*start_method=\"fork\""
    with loader, pytest.raises(SourceError, match=said):
        next(iter(loader))


def test_threads_have_nobody_to_call_it_for() -> None:
    with pytest.raises(ValueError, match=r"init=.* has no effect without workers of kind"):
        Workers(kind="thread", init=data.tell_data_set)
