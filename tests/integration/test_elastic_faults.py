"""What else happens to a swarm: frozen peers, dead anchors, cut links, flipped bits, full disks."""

import json
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from support.elastic_swarms import HEARTBEAT, assert_exact, by_step, fault, hold, peer_alone
from support.products import only_first

from benchmarks.swarms.network import Network, available
from benchmarks.swarms.swarm import Nursery, Process, Swarm, free_ports, until
from trainers.elastic.peer.step_log import read_history

STEPS = 14
USUAL: dict[str, Any] = {"steps": STEPS, "sum": "exact", "even": True}
SHORT = 3.0
"""A heartbeat that a test waits for."""


@pytest.fixture(scope="module")
def expected(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The weights of each step in one process that never had peers."""
    return by_step(peer_alone(tmp_path_factory.mktemp("alone"), nursery, USUAL))


def end_well(peers: list[Process], expected: dict[int, str]) -> None:
    """All of these come to the last step, with the weights of one process."""
    for peer in peers:
        result = peer.result()
        assert (result["step"], result["error"]) == (STEPS, ""), peer.name
        found = by_step(peer)
        assert max(found) == STEPS
        assert found.items() <= expected.items()


# ---- frozen peers -------------------------------------------------------------------------------


def test_a_peer_that_is_frozen_for_less_than_the_heartbeat_stays(
    nursery: Nursery, expected: dict[int, str], tmp_path: Path
) -> None:
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT) as swarm:
        begin = hold(0, 2)
        frozen = swarm.peer("a", **USUAL, faults=[begin, fault("stop", "compute", 5, members=2)])
        other = swarm.peer("b", **USUAL, faults=[begin])
        until(lambda: frozen.stopped, "the stop", 60, frozen.said)
        frozen.kill(signal.SIGCONT)
        end_well([frozen, other], expected)
        assert not any("silent" in line for line in swarm.told)
        assert_exact(swarm.peers, STEPS)


@pytest.mark.parametrize("times", only_first(2, 10))
def test_a_frozen_peer_is_expelled_and_told_so_and_can_come_again(
    nursery: Nursery, expected: dict[int, str], tmp_path: Path, times: int
) -> None:
    with Swarm(tmp_path, nursery, heartbeat=SHORT) as swarm:
        begin, again = hold(0, 2), hold(9, 2)
        frozen = swarm.peer("a", **USUAL, faults=[begin, fault("stop", "compute", 5, members=2)])
        other = swarm.peer("b", **USUAL, faults=[begin, again])
        until(lambda: frozen.stopped, "the stop", 60, frozen.said)
        other.until_step(9 if times == 2 else 6)
        silence = next(line for line in swarm.told if "silent" in line)
        seconds = float(re.findall(r"silent for ([\d.]+) s", silence)[0])
        assert seconds >= SHORT
        if times > 2:
            with pytest.raises(TimeoutError):
                until(lambda: False, "nothing", (times - 2) * SHORT)
        frozen.kill(signal.SIGCONT)
        assert frozen.result()["error"].startswith("Expelled: a was silent for")
        comes = swarm.peer("a2", **USUAL)
        end_well([other, comes], expected)
        assert_exact(swarm.peers, STEPS)


# ---- anchors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["compute", "mid_reduce", "vote", "applied", "forming", "gate"])
def test_a_second_anchor_takes_over_where_the_first_is_killed(
    nursery: Nursery, expected: dict[int, str], tmp_path: Path, at: str
) -> None:
    ports = free_ports(2)
    with Swarm(tmp_path, nursery, own_anchor=False) as swarm:
        swarm.join = ",".join(f"127.0.0.1:{port}" for port in ports)
        usual = {"only_anchor": False, "heartbeat": HEARTBEAT}
        first = swarm.anchor("first", port=ports[0], **usual)
        second = swarm.anchor("second", port=ports[1], **usual, standby=True, follows=True)
        begin, later = hold(0, 2), hold(10, 3)
        changes = at in ("forming", "gate")
        kill = fault("kill_other", at, 0 if changes else 5, members=2, pid=first.pid)
        # A generation forms in the middle of the run only where somebody comes or dies.
        a = swarm.peer(
            "a", **USUAL, faults=[begin, *([hold(5, 3)] if changes else []), kill, later]
        )
        b = swarm.peer("b", **USUAL, faults=[begin, *([hold(5, 3)] if changes else []), later])
        if changes:
            a.until_step(5)
            swarm.peer("c", **USUAL, faults=[later])
        assert first.wait() == -9
        if not changes:
            a.until_step(9)
            swarm.peer("c", **USUAL)
        end_well(swarm.peers, expected)
        assert "has come back" in second.said()
        assert [r["at"] for r in a.happened()] == [at]
        assert all(not peer.result()["gaps"] for peer in swarm.peers) or changes
        assert_exact(swarm.peers, STEPS)
        assert b.result()["digest"] == a.result()["digest"]


def test_an_anchor_and_a_peer_die_together(
    nursery: Nursery, expected: dict[int, str], tmp_path: Path
) -> None:
    ports = free_ports(2)
    with Swarm(tmp_path, nursery, own_anchor=False) as swarm:
        swarm.join = ",".join(f"127.0.0.1:{port}" for port in ports)
        usual = {"only_anchor": False, "heartbeat": HEARTBEAT}
        first = swarm.anchor("first", port=ports[0], **usual)
        second = swarm.anchor("second", port=ports[1], **usual, standby=True, follows=True)
        begin = hold(0, 3)
        both = [
            fault("kill_other", "mid_reduce", 5, members=3, pid=first.pid),
            fault("kill", "mid_reduce", 5, members=3),
        ]
        killed = swarm.peer("a", **USUAL, faults=[begin, *both])
        stay = [swarm.peer(name, **USUAL, faults=[begin]) for name in "bc"]
        end_well(stay, expected)
        assert (first.wait(), killed.wait()) == (-9, -9)
        assert_exact(swarm.peers, STEPS)
        # Its host said so: nobody waited for a heartbeat.
        assert "a has died while no anchor was there" in second.said()


def test_an_anchor_that_was_frozen_takes_nobody_for_silent(
    nursery: Nursery, expected: dict[int, str], tmp_path: Path
) -> None:
    with Swarm(tmp_path, nursery, own_anchor=False) as swarm:
        anchor = swarm.anchor("anchor", heartbeat=SHORT)
        swarm.join = anchor.out.joinpath("address.txt").read_text().strip()
        begin, waits = hold(0, 2), fault("wait", "applied", 5, seconds=2 * SHORT)
        peers = [swarm.peer(name, **USUAL, faults=[begin, waits]) for name in "ab"]
        for peer in peers:
            peer.until_step(5)
        anchor.kill(signal.SIGSTOP)
        until(lambda: anchor.stopped, "the stop", 60, anchor.said)
        threading.Event().wait(1.5 * SHORT)
        anchor.kill(signal.SIGCONT)
        end_well(peers, expected)
        assert "silent" not in anchor.said()


# ---- newcomers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["donor", "frozen donor", "newcomer"])
def test_a_death_while_the_state_is_given_harms_nobody(
    nursery: Nursery, expected: dict[int, str], tmp_path: Path, who: str
) -> None:
    frozen = who == "frozen donor"
    with Swarm(tmp_path, nursery, heartbeat=SHORT if frozen else HEARTBEAT) as swarm:
        begin, later = hold(0, 2), hold(9, 2)
        dies = fault("stop" if frozen else "kill", "giving", 1, members=2)
        faults = [begin, hold(5, 3 if who == "newcomer" else 2), later]
        a = swarm.peer("a", **USUAL, faults=faults)
        # Newcomers have the state from who came last.
        until(lambda: "a has come" in swarm.told, "a", 60, a.said)
        gives = [begin, hold(1, 3), dies]
        b = swarm.peer("b", **USUAL, faults=faults if who == "newcomer" else gives)
        a.until_step(1)
        copying = [fault("kill", "copying", 0)] if who == "newcomer" else []
        c = swarm.peer("c", **USUAL, faults=copying)
        if who == "newcomer":
            assert c.wait() == -9
            comes = swarm.peer("d", **USUAL)
            end_well([a, b, comes], expected)
        else:
            if frozen:
                until(lambda: b.stopped, "the stop", 60, b.said)
                until(lambda: c.step > 0, "the steps of the newcomer", 90, c.said)
                b.kill()
            assert b.wait() == -9
            end_well([a, c], expected)
        assert_exact(swarm.peers, STEPS)


# ---- links, disks, bits, numbers ----------------------------------------------------------------


@pytest.mark.parametrize("at", ["before_reduce", "mid_reduce", "vote"])
def test_a_link_between_two_living_peers_is_cut_and_nothing_is_lost(
    nursery: Nursery, expected: dict[int, str], tmp_path: Path, at: str
) -> None:
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT) as swarm:
        begin = hold(0, 3)
        cuts = fault("cut", at, 5, members=3)
        peers = [swarm.peer("a", **USUAL, faults=[begin, cuts])]
        peers += [swarm.peer(name, **USUAL, faults=[begin]) for name in "bc"]
        end_well(peers, expected)
        assert peers[0].result()["gaps"]
        assert_exact(peers, STEPS)


@pytest.mark.skipif(not available(), reason="makes network namespaces, which root may on Linux")
def test_a_link_that_is_cut_in_silence_is_noticed_and_the_youngest_peer_makes_room(
    nursery: Nursery, tmp_path: Path
) -> None:
    usual = {**USUAL, "steps": 400, "slow": 0.01}
    with (
        Network(3, tag="tf") as net,
        Swarm(tmp_path, nursery, host=net.anchor_host, heartbeat=SHORT) as swarm,
    ):
        peers = []
        for number, name in enumerate("abc"):
            where = {"namespace": net.names[number], "strategy": {"host": net.hosts[number]}}
            peers.append(swarm.peer(name, **usual, **where, faults=[hold(0, 3)]))
            until(lambda n=name: f"{n} has come" in swarm.told, "the peer", 60, peers[-1].said)
        peers[0].until_step(5)
        net.cut(1, 2)
        until(lambda: any(p.code is not None for p in peers), "the expulsion", 80, peers[0].said)
        expelled = next(peer for peer in peers if peer.code is not None)
        assert "cannot reach each other" in expelled.result()["error"]
        stay = [peer for peer in peers if peer is not expelled]
        at = stay[0].step
        stay[0].until_step(at + 5)
        assert len({by_step(peer)[at + 3] for peer in stay}) == 1


def test_more_peers_than_lanes_stay_equal_and_some_of_them_compute_nothing(
    nursery: Nursery, tmp_path: Path
) -> None:
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT) as swarm:
        usual = {**USUAL, "lanes": 2, "faults": [hold(0, 3)]}
        peers = [swarm.peer(name, **usual) for name in "abc"]
        assert len({peer.result()["digest"] for peer in peers}) == 1
        assert [peer.result()["error"] for peer in peers] == [""] * 3
        history = read_history([peer.log for peer in peers])
        assert all(len(commit.added) <= 2 for commit in history.commits.values())


def test_a_full_disk_at_a_checkpoint_is_told_and_stops_nobody(
    nursery: Nursery, expected: dict[int, str], tmp_path: Path
) -> None:
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT) as swarm:
        usual = {**USUAL, "checkpoints": 3}
        full = fault("disk", "checkpoint", 5)
        writer = swarm.peer("a", **usual, faults=[hold(0, 2), full])
        until(lambda: "a has come" in swarm.told, "the writer", 60, writer.said)
        other = swarm.peer("b", **usual, faults=[hold(0, 2)])
        end_well([writer, other], expected)
        assert "No space left on device" in writer.said()
        names = [path.name for path in writer.out.joinpath("checkpoints").iterdir()]
        steps = sorted(int(re.findall(r"step=(\d+)", name)[0]) for name in names)
        assert steps == [3, 9, 12]
        assert not other.out.joinpath("checkpoints").exists()


def test_a_flipped_bit_expels_the_odd_peer_which_comes_again_with_the_others_weights(
    nursery: Nursery, tmp_path: Path
) -> None:
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT) as swarm:
        begin, again = hold(0, 3), hold(10, 3)
        odd = swarm.peer("a", **USUAL, faults=[begin, fault("flip", "batch_end", 6, members=3)])
        rest = [swarm.peer(name, **USUAL, faults=[begin, again]) for name in "bc"]
        error = odd.result()["error"]
        assert error.startswith("Expelled: the weights here differ from those of 2 other members")
        comes = swarm.peer("a2", **USUAL)
        digests = {peer.result()["digest"] for peer in (*rest, comes)}
        assert len(digests) == 1
        assert [peer.result()["step"] for peer in rest] == [STEPS] * 2


def test_a_flipped_bit_stops_two_peers_because_none_is_a_majority(
    nursery: Nursery, tmp_path: Path
) -> None:
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT) as swarm:
        begin = hold(0, 2)
        peers = [
            swarm.peer("a", **USUAL, faults=[begin, fault("flip", "batch_end", 6, members=2)]),
            swarm.peer("b", **USUAL, faults=[begin]),
        ]
        for peer in peers:
            result = peer.result()
            assert re.match("SwarmStopped: the weights of (a, b|b, a) differ", result["error"])
            assert result["step"] == 6


@pytest.mark.parametrize("sum", ["fast", "exact"])
def test_a_loss_that_is_no_number_stops_all_and_names_lane_and_samples(
    nursery: Nursery, tmp_path: Path, sum: str
) -> None:
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT) as swarm:
        begin, usual = hold(0, 2), {**USUAL, "sum": sum}
        bad = fault("nan", "lane", 5, members=2)
        a = swarm.peer("a", **usual, faults=[begin, bad])
        b = swarm.peer("b", **usual, faults=[begin])
        errors = [peer.result()["error"] for peer in (a, b)]
        serves = map(json.loads, a.out.joinpath("serves.jsonl").read_text().splitlines())
        lane, ids = next((lane, ids) for step, lane, _, ids in serves if step == 5)
        for error in errors:
            assert error.startswith("SwarmStopped: a: step 5 cannot be made of lane"), error
            assert f"of lane {lane} with samples {ids}: its loss is not finite" in error
        assert [peer.result()["step"] for peer in (a, b)] == [5, 5]


def test_clocks_of_peers_may_be_an_hour_apart(
    nursery: Nursery, expected: dict[int, str], tmp_path: Path
) -> None:
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT) as swarm:
        begin = hold(0, 2)
        ahead = swarm.peer("a", **USUAL, faults=[begin], clock=3600.0)
        end_well([ahead, swarm.peer("b", **USUAL, faults=[begin], clock=-3600.0)], expected)


# ---- ends ---------------------------------------------------------------------------------------


def test_ctrl_c_at_one_peer_ends_that_peer_and_the_others_go_on(
    nursery: Nursery, expected: dict[int, str], tmp_path: Path
) -> None:
    with Swarm(tmp_path, nursery, heartbeat=HEARTBEAT) as swarm:
        begin = hold(0, 2)
        leaves = swarm.peer("a", **USUAL, faults=[begin, fault("interrupt", "lane", 5, members=2)])
        stays = swarm.peer("b", **USUAL, faults=[begin])
        assert leaves.wait() != -9
        end_well([stays], expected)
        assert 5 <= max(by_step(leaves)) <= 6
        assert by_step(leaves).items() <= expected.items()
        assert_exact(swarm.peers, STEPS)
