"""The programs of a swarm: an anchor, peers that come and die, and a replay of it all."""

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from support.elastic_programs import Programs, Recipe, equal
from support.secret_files import write_secret
from support.strange_messages import HELLO

from benchmarks.swarms.swarm import free_ports, until
from perfect.anchor import main as anchor_main
from trainers.elastic.wire.address import Address
from trainers.elastic.wire.channel import Channel
from trainers.elastic.wire.listener import connect
from trainers.elastic.wire.secret import read_secret
from trainers.elastic.wire.wire_errors import Unreachable

HERE = Path(__file__).parent


def test_peers_that_come_and_die_train_both_phases_alike_and_a_replay_is_equal(
    programs: Programs, swarm_recipe: Recipe
) -> None:
    programs.write(swarm_recipe)
    anchor = programs.anchor("--min-peers", "2")
    first, killed = programs.peer("a"), programs.peer("b")
    programs.until_step(first, 2)
    os.kill(killed.pid, signal.SIGSTOP)  # the run waits until the newcomer is there
    newcomer = programs.peer("c")
    until(lambda: "c has come" in anchor.said(), "c", 120, newcomer.said)
    os.kill(killed.pid, signal.SIGCONT)
    programs.until_step(newcomer, 14)
    killed.kill()
    assert (first.wait(), newcomer.wait(), anchor.wait()) == (0, 0, 0), first.said()

    runs = [programs.run(name) for name in "ac"]
    assert [run["status"] for run in runs] == ["completed"] * 2
    assert equal(programs.weights("a"), programs.weights("c"))
    assert runs[0]["phases"] == runs[1]["phases"]
    keys = ("name", "first_step", "last_step", "decoded")
    assert [tuple(phase[key] for key in keys) for phase in runs[0]["phases"]] == [
        ("pretrain", 0, 35, 3 * 60),
        ("finetune", 36, 47, 3 * 60),
    ]
    assert runs[0]["trace"][-1] == runs[1]["trace"][-1]
    assert runs[0]["accuracy"] == runs[1]["accuracy"]

    replay = programs.replay("a", "b", "c")
    assert replay.wait() == 0, replay.said()
    assert f"equal: {runs[0]['steps']} steps, and the final weights" in replay.said()

    swarm = runs[0]["elastic"]
    assert {peer["name"] for peer in swarm["peers"]} == {"a", "b", "c"}
    assert [gap["why"] for gap in swarm["gaps"]] == [swarm["generations"][-2]["ended"]]
    page = (programs.folder / "a" / "report.html").read_text()
    assert "The swarm" in page and "ended unplanned" in page
    for text in (">Samples/s<", ">Utilisation<", ">Sent<"):
        assert text in page
    for peer in swarm["peers"]:
        assert peer["samples"] and 0 < peer["seconds"] <= peer["present"], peer
        assert peer["bytes_sent"] > 0
    with (programs.folder / "a" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["elastic/a/sent_bytes"]]
    told = [(row["elastic/a/samples_per_second"], row["elastic/a/lanes"]) for row in rows]
    assert any(float(lanes) for _, lanes in told)
    assert all((float(samples) > 0) == (float(lanes) > 0) for samples, lanes in told)
    assert any(row["elastic/b/sent_bytes"] for row in rows)
    assert not rows[-1]["elastic/b/sent_bytes"]  # b is dead by then
    assert "samples/s" in first.said() and "sent; " in first.said()


def test_a_swarm_that_was_stopped_goes_on_from_a_peers_checkpoint(
    programs: Programs, swarm_recipe: Recipe
) -> None:
    programs.write(swarm_recipe)
    programs.anchor()
    peer = programs.peer("a")
    programs.until_step(peer, 17)
    peer.kill()
    peer.wait()
    last = programs.step("a")
    again = programs.peer("a")
    assert again.wait() == 0, again.said()
    began = [line for line in programs.lines("a") if "begins" in line]
    assert [line["with"] for line in began] == ["nothing", "checkpoint"]
    assert 0 < began[1]["begins"] <= last + 1
    replay = programs.replay("a")
    assert replay.wait() == 0, replay.said()
    assert "and the final weights" in replay.said()


def test_a_frozen_peer_is_expelled_and_joins_again_by_itself(
    programs: Programs, swarm_recipe: Recipe
) -> None:
    swarm_recipe["phases"][0]["passes"] = 6
    programs.write(swarm_recipe)
    anchor = programs.anchor("--min-peers", "2", heartbeat=2.0)  # so that `a` waits for `b`
    first, frozen = programs.peer("a"), programs.peer("b")
    programs.until_step(frozen, 3)
    os.kill(frozen.pid, signal.SIGSTOP)
    until(lambda: "b was silent" in anchor.said(), "the expulsion of b", 60, anchor.said)
    os.kill(frozen.pid, signal.SIGCONT)
    assert (first.wait(), frozen.wait()) == (0, 0), frozen.said()
    assert "this peer joins again" in frozen.said()
    assert equal(programs.weights("a"), programs.weights("b"))


def test_a_peer_of_another_configuration_is_refused_with_the_key_that_differs(
    programs: Programs, swarm_recipe: Recipe
) -> None:
    programs.write(swarm_recipe)
    other = swarm_recipe | {"optimizer": {"name": "sgd", "lr": 0.3}}
    programs.write(other, "other.yaml")
    programs.anchor()
    first = programs.peer("a")
    programs.until_step(first, 0)
    os.kill(first.pid, signal.SIGSTOP)  # it ends after the other one
    odd = programs.peer("b", "other.yaml")
    assert odd.wait() == 1
    os.kill(first.pid, signal.SIGCONT)
    assert "config.optimizer.lr is 0.3 here and 0.1 there" in " ".join(odd.said().split())
    assert first.wait() == 0, first.said()


def test_an_altered_log_is_told_with_its_step(programs: Programs, swarm_recipe: Recipe) -> None:
    swarm_recipe["phases"] = [{"name": "only", "passes": 1}]
    del swarm_recipe["ema"]
    programs.write(swarm_recipe)
    programs.anchor()
    peer = programs.peer("a")
    assert peer.wait() == 0, peer.said()
    log = programs.folder / "a" / "elastic" / "a.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    third = next(line for line in lines if line.get("commit") == 2)
    third["digest"] = "0" * len(third["digest"])
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = {p: p.stat().st_mtime_ns for p in (programs.folder / "a").rglob("*")}
    replay = programs.replay("a")
    assert replay.wait() == 1
    assert "different: step 2 comes to" in replay.said()
    assert before == {p: p.stat().st_mtime_ns for p in (programs.folder / "a").rglob("*")}


@pytest.mark.usefixtures("beside_secret")
def test_check_says_lanes_memory_and_utilisation(
    train: Callable[..., tuple[int, Path]], swarm_recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"peers": 4, "network": "100Mbps", "seconds_per_sample": 0.5}
    swarm_recipe["elastic"] |= more
    assert train(swarm_recipe, "--check")[0] == 0
    said = capsys.readouterr().out
    assert "8 lanes of 2 samples are a step of 16" in said and "12 steps a pass" in said
    assert "warning: 2 lanes for each of 4 peers are few" in said
    assert "4 peers at 100Mbps: compute 2 s" in said
    assert "or more keeps it at 90%" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--join", "127.0.0.1:1"], "elastic: is missing, but --join was given"),
        (["--name", "a"], "elastic: is missing, but --name was given"),
    ],
)
def test_options_of_a_swarm_without_the_section_are_refused(
    train: Callable[..., tuple[int, Path]], recipe: Recipe, options: list[str], said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert train(recipe, *options)[0] == 2
    assert said in capsys.readouterr().err


def test_the_section_without_an_anchor_to_join_is_refused(
    train: Callable[..., tuple[int, Path]], swarm_recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(swarm_recipe)[0] == 2
    assert "give --join HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--join", "127.0.0.1:1"], ["--check"]], ids=" ".join)
def test_check_refuses_what_the_run_would_refuse_in_the_same_words(
    train: Callable[..., tuple[int, Path]], swarm_recipe: Recipe, options: list[str],
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert train(swarm_recipe, *options)[0] == 2
    assert "elastic.secret_file: the secret file secret cannot be read" in capsys.readouterr().err
    secret = write_secret(tmp_path)
    swarm_recipe["elastic"] |= {"secret_file": str(secret), "host": "0.0.0.0"}
    assert train(swarm_recipe, *options)[0] == 2
    assert "or give elastic.insecure_network: true" in capsys.readouterr().err


# ---- the anchor ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_an_anchor_ends_when_it_is_asked(programs: Programs, number: int, code: int) -> None:
    anchor = programs.anchor()
    anchor.kill(number)
    assert anchor.wait() == code, anchor.said()
    assert "Traceback" not in anchor.said()


def test_an_address_in_use_is_told_in_one_line(programs: Programs) -> None:
    programs.anchor()
    second = programs.begin(
        "perfect.anchor", "second", "--listen", programs.join, "--secret-file", "secret"
    )
    assert second.wait() == 2
    [line] = second.said().splitlines()
    assert line.startswith("perfect-anchor: ") and programs.join in line and "in use" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--listen", "nowhere"], "has no port: write HOST:PORT"),
        (["--listen", "0.0.0.0:29400"], "of a VPN, or give --insecure-network"),
        (["--listen", "127.0.0.1:29400", "--min-peers", "0"], "--min-peers 0: give 1 or more"),
        (["--listen", "127.0.0.1:29400", "--heartbeat", "0"], "--heartbeat 0: give seconds"),
        (["--listen", "127.0.0.1:29400", "--heartbeat", "nan"], "--heartbeat nan: give seconds"),
    ],
)
def test_what_an_anchor_cannot_be_started_with_is_told(
    programs: Programs, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = anchor_main([*options, "--secret-file", str(programs.secret)])
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.cold
def test_an_anchor_serves_though_its_output_cannot_be_written(programs: Programs) -> None:
    address, secret = Address("127.0.0.1", free_ports(1)[0]), programs.secret
    listens = ["--listen", str(address), "--secret-file", str(secret)]
    channels: list[Channel] = []

    def is_there() -> bool:
        with suppress(Unreachable):
            channels.append(connect([address], read_secret(secret), 5))
        return bool(channels)

    with (
        open("/dev/full", "w") as full,
        subprocess.Popen([sys.executable, "-m", "perfect.anchor", *listens], stdout=full) as anchor,
    ):
        try:
            until(is_there, "the anchor", 60)
            with channels[0] as channel:
                channel.send("hello", **HELLO)
                assert channel.receive(20).kind == "welcome"
        finally:
            anchor.kill()


@pytest.mark.cold
def test_an_anchor_needs_neither_torch_nor_lightning() -> None:
    script = "import sys, perfect.anchor; print({'torch', 'lightning', 'numpy'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


# ---- the example --------------------------------------------------------------------------------


@pytest.mark.full
def test_the_example_trains_with_a_kill_and_a_join_and_its_replay_is_equal(tmp_path: Path) -> None:
    script = HERE.parents[1] / "examples" / "elastic_on_one_machine.sh"
    paths = [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        ["sh", str(script)], capture_output=True, text=True, timeout=290, check=False,
        env=os.environ
        | {
            "PYTHON": sys.executable, "OUT": str(tmp_path / "demo"), "PASSES": "2",
            "PORT": str(free_ports(1)[0]), "PYTHONPATH": os.pathsep.join(paths),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: " in done.stdout and "and the final weights" in done.stdout
    assert "b is gone" in done.stdout
