"""The logs of a swarm as one history: what agrees, what is void, and what is damaged."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from trainers.elastic.deciding.view import Member, View
from trainers.elastic.errors import LogDamaged
from trainers.elastic.peer.step_log import (
    Era,
    History,
    StepLog,
    newest_era,
    read_history,
    read_lines,
)

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


FIRST = Era("x", 1)
SECOND = Era("y", 2, after="x", step=2)


def begins(era: Era, source: str, time: float = 0.0) -> dict[str, Any]:
    return {"begins": era.step, "with": source, "era": era.plain(), "time": time}


def digests(history: History) -> str:
    return "".join(history.commits[n].digest for n in range(history.steps))


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_steps_that_were_lost_with_all_peers_are_void_whatever_the_clocks_say(
    tmp_path: Path, hours: int
) -> None:
    first = begins(FIRST, "nothing"), *commits(0, "abcd", 0)
    second = begins(SECOND, "checkpoint", 50), *commits(2, "xyz", 51)
    one = write(tmp_path / "a", [RUN, *first, RUN, *second])
    ahead = 3600.0 * hours
    member = begins(FIRST, "member", ahead) | {"begins": 1}
    lost = write(tmp_path / "b", [RUN, member, *commits(1, "bcd", ahead)])
    for paths in ([one, lost], [lost, one]):
        assert digests(read_history(paths)) == "abxyz"


def test_a_checkpoint_of_an_older_life_takes_up_that_life(tmp_path: Path) -> None:
    third = Era("z", 3, after="x", step=3)
    lines = [
        *(begins(FIRST, "nothing"), *commits(0, "abcd", 0)),
        *(begins(SECOND, "checkpoint"), *commits(2, "xyz", 0)),
        *(begins(third, "checkpoint"), *commits(3, "rs", 0)),
    ]
    assert digests(read_history([write(tmp_path / "a", [RUN, *lines])])) == "abcrs"


def test_a_run_that_was_begun_anew_is_the_only_one_that_counts(tmp_path: Path) -> None:
    anew = begins(Era("n", 2), "nothing"), *commits(0, "x", 0)
    lines = [RUN, begins(FIRST, "nothing"), *commits(0, "abcd", 0), *anew]
    assert digests(read_history([write(tmp_path / "a", lines)])) == "x"


def test_steps_before_the_checkpoint_still_have_to_agree(tmp_path: Path) -> None:
    first = begins(FIRST, "nothing"), *commits(0, "ab", 0)
    one = write(tmp_path / "a", [RUN, *first, begins(SECOND, "checkpoint"), *commits(2, "x", 51)])
    two = write(tmp_path / "b", [RUN, begins(FIRST, "member"), *commits(1, "q", 1)])
    with pytest.raises(LogDamaged, match="step 1 has digest q"):
        read_history([one, two])


def test_two_lives_that_do_not_know_of_each_other_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "a", [RUN, begins(SECOND, "checkpoint"), *commits(2, "c", 0)])
    other = Era("w", 2, after="x", step=1)
    two = write(tmp_path / "b", [RUN, begins(other, "checkpoint"), *commits(1, "q", 0)])
    with pytest.raises(LogDamaged, match=r"w from step 1 on and y from step 2 on: give the logs"):
        read_history([one, two])


def test_logs_without_eras_are_one_era_which_a_later_one_takes_up(tmp_path: Path) -> None:
    old = [RUN, {"begins": 0, "with": "nothing"}, *commits(0, "abc", 0)]
    assert digests(read_history([write(tmp_path / "a", old)])) == "abc"
    new = begins(Era("y", 1, step=2), "checkpoint"), *commits(2, "xy", 0)
    assert digests(read_history([write(tmp_path / "b", [*old, *new])])) == "abxy"


def test_the_eras_of_a_log_are_written_and_known_again(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.jsonl"
    log = StepLog(path, RUN["run"])
    log.begins(2, "checkpoint", SECOND)
    log.generation(View(4, (Member("a", "here", 1),)), 2)
    log.close()
    assert newest_era([path]) == 2
    assert [line.get("era") for line in read_lines(path)] == [None, SECOND.plain(), "y"]


def test_times_go_on_when_the_clock_goes_back_by_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = StepLog(tmp_path / "a.jsonl", RUN["run"])
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600.0)
    log.begins(0, "nothing", FIRST)
    log.close()
    first, second = (line["time"] for line in read_lines(tmp_path / "a.jsonl"))
    assert now - 60 < first <= second
