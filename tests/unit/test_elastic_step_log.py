"""The logs of a swarm as one history: what agrees, what is void, and what is damaged."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainers.elastic.errors import LogDamaged
from trainers.elastic.replaying.step_log import read_history

RUN = {"run": {"lanes": 2, "sum": "fast", "micro": 1}}


def commits(first: int, digests: str, time: float) -> list[dict[str, Any]]:
    return [
        {"commit": first + n, "added": [["a", [0, 1]]], "digest": digest, "time": time + n}
        for n, digest in enumerate(digests)
    ]


def write(path: Path, lines: list[dict[str, Any]], rest: str = "") -> Path:
    path.write_text("".join(json.dumps({"time": 0.0, **line}) + "\n" for line in lines) + rest)
    return path


def test_two_peers_that_overlap_are_one_history(tmp_path: Path) -> None:
    one = write(tmp_path / "a", [RUN, *commits(0, "abc", 0)], rest='{"commit": 3')
    two = write(tmp_path / "b", [RUN, *commits(2, "cd", 0)])
    history = read_history([one, two])
    assert history.steps == 4
    assert [history.commits[n].digest for n in range(4)] == ["a", "b", "c", "d"]


def test_two_peers_that_disagree_are_refused_with_the_step(tmp_path: Path) -> None:
    one = write(tmp_path / "a", [RUN, *commits(0, "abc", 0)])
    two = write(tmp_path / "b", [RUN, *commits(1, "bx", 0)])
    with pytest.raises(LogDamaged, match="step 2 has digest x"):
        read_history([one, two])


def test_steps_that_were_lost_with_all_peers_are_void_where_one_began_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    begun = {"begins": 2, "with": "checkpoint", "time": 50.0}
    one = write(tmp_path / "a", [RUN, *commits(0, "abcd", 0), RUN, begun, *commits(2, "xyz", 51)])
    lost = write(tmp_path / "b", [RUN, *commits(1, "bcd", 1)])
    for paths in ([one, lost], [lost, one]):
        history = read_history(paths)
        assert "".join(history.commits[n].digest for n in range(5)) == "abxyz"


def test_steps_before_the_checkpoint_still_have_to_agree(tmp_path: Path) -> None:
    begun = {"begins": 2, "with": "checkpoint", "time": 50.0}
    one = write(tmp_path / "a", [RUN, *commits(0, "ab", 0), RUN, begun, *commits(2, "x", 51)])
    two = write(tmp_path / "b", [RUN, *commits(1, "q", 1)])
    with pytest.raises(LogDamaged, match="step 1 has digest q"):
        read_history([one, two])
