"""Sections of a YAML beside `elastic:`, through the programs of a swarm."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.elastic_programs import Programs, Recipe, equal

from benchmarks.swarms.swarm import until

ROOT = Path(__file__).parents[2]
Train = Callable[..., tuple[int, Path]]


@pytest.fixture
def words(text: Path) -> Recipe:
    """A small GPT-2 in 4 lanes of 2 samples."""
    recipe = yaml.safe_load((ROOT / "configs" / "gpt2" / "tiny.yaml").read_text())
    del recipe["offload"]
    recipe["data"] |= {"root": str(text), "vocabulary": 258, "evaluation_samples": 8}
    recipe["loader"] |= {"batch_size": 8, "workers": 1}
    recipe["phases"] = [{"name": "only", "steps": 6}]
    recipe["trainer"] |= {"accelerator": "cpu", "threads": 1, "precision": "32-true"}
    return recipe | {"elastic": {"secret_file": "secret", "lanes": 4}}


def test_a_peer_with_a_budget_and_one_without_train_alike_and_a_replay_is_equal(
    programs: Programs, words: Recipe
) -> None:
    programs.write(words)
    programs.write(words | {"offload": {"budget": "80%"}}, "planned.yaml")
    anchor = programs.anchor("--min-peers", "2")
    plain, planned = programs.peer("plain"), programs.peer("planned", "planned.yaml")
    assert planned.wait() == 0, planned.said()
    assert (plain.wait(), anchor.wait()) == (0, 0), plain.said()
    assert equal(programs.weights("plain"), programs.weights("planned"))
    for first in (["planned", "plain"], ["plain", "planned"]):
        replay = programs.replay(*first)
        assert replay.wait() == 0, replay.said()
        assert "equal: 6 steps, and the final weights" in replay.said()


@pytest.mark.usefixtures("beside_secret")
def test_check_plans_a_lane_of_every_batch_size(
    train: Train, words: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    words["phases"].append({"name": "more", "steps": 2, "batch_size": 16})
    assert train(words | {"offload": {"budget": "90%"}}, "--check")[0] == 0
    said = capsys.readouterr().out
    assert "a lane of phase only, batches of 2" in said
    assert "a lane of phase more, batches of 4" in said


@pytest.mark.usefixtures("beside_secret")
def test_check_refuses_a_budget_that_no_lane_keeps(
    train: Train, words: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(words | {"offload": {"budget": "1KiB"}}, "--check")[0] == 2
    assert "offload.budget: " in capsys.readouterr().err


@pytest.mark.usefixtures("beside_secret")
def test_check_warns_of_a_phase_whose_passes_have_one_step(
    train: Train, swarm_recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    swarm_recipe["elastic"]["lanes"] = 4
    swarm_recipe["phases"][1]["batch_size"] = 60  # all pictures
    assert train(swarm_recipe, "--check")[0] == 0
    said = capsys.readouterr().out
    assert "warning: phase finetune: a pass has one step" in said
    assert "warning: phase pretrain" not in said


def test_a_peer_that_comes_to_write_checkpoints_writes_one_at_once(
    programs: Programs, swarm_recipe: Recipe
) -> None:
    swarm_recipe["phases"][0]["passes"] = 60  # nobody waits for their end
    swarm_recipe["checkpoint"] = {"every_steps": 10**6}
    programs.write(swarm_recipe)
    programs.anchor("--min-peers", "1")
    writer = programs.peer("a")
    programs.until_step(writer, 0)
    other = programs.peer("b")
    is_member = lambda: any("generation" in line for line in programs.lines("b"))  # noqa: E731
    until(is_member, "b as a member", 120, other.said)
    programs.until_step(other, programs.step("b") + 1)
    writer.kill()
    written = programs.folder / "b" / "last.ckpt"
    until(written.exists, "the checkpoint of b", 60, other.said)
    assert not (programs.folder / "a" / "last.ckpt").exists()
    assert "this peer writes the checkpoints from step" in other.said()
