"""Two ranks under torch.distributed read one stream: no doubles, and equally many batches."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.stream_shards import write_shards

SCRIPT = Path(__file__).parents[1] / "support" / "stream_ranks.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("stream_ranks")
    write_shards(folder, (6, 6, 6, 6))
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{n}.json").read_text()) for n in range(2)]


@pytest.mark.parametrize("case", ["tars", "an iterable"])
def test_ranks_share_a_pass(case: str, told: list[dict[str, Any]]) -> None:
    one, other = (rank[case] for rank in told)
    assert len(one) == len(other) == 5
    served = Counter(number for batch in [*one, *other] for number in batch)
    assert len(served) == 20 and set(served.values()) == {2}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("unknown length", "samples=n"),
        ("other seeds", "do not share one stream: seed is 1 on rank 1, but 0 on rank 0"),
        ("other lengths", "samples is 22 on rank 1, but 20 on rank 0"),
        ("other tars", "do not share one stream: stream is 2 tars"),
        ("one tar", "1 tars cannot be dealt to 2 ranks"),
        ("one rank twice", "2 loaders say that they are rank 1"),
    ],
)
def test_ranks_that_would_not_share_one_are_refused(
    case: str, said: str, told: list[dict[str, Any]]
) -> None:
    for rank in told:
        assert said in str(rank[case])
