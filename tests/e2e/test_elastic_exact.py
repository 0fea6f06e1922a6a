"""With `sum: exact` a run of peers that come and die is that of one process, bit for bit."""

from support.elastic_programs import Programs, Recipe, equal

HEARTBEAT = 10.0
"""A new anchor waits as long before a run begins, and a busy machine expels nobody."""
ALIKE = ("phases", "switches", "trace", "accuracy", "best_accuracy", "steps")
"""What run.json tells of a whole swarm."""


def train_alone_and_with_a_kill_and_a_join(programs: Programs, recipe: Recipe) -> list[Recipe]:
    """Return run.json of one process that never had peers, and of the two peers that were there at
    the end: the third one was killed, and the last one came in its place."""
    recipe["elastic"] |= {"sum": "exact"}
    programs.write(recipe)
    programs.anchor(heartbeat=HEARTBEAT)
    one = programs.peer("one")
    assert one.wait() == 0, one.said()
    anchor = programs.anchor("--min-peers", "2", heartbeat=HEARTBEAT)
    stays, killed = programs.peer("a"), programs.peer("b")
    programs.until_step(stays, 3)
    killed.kill()  # so that `a` waits for another one
    comes = programs.peer("c")
    assert (stays.wait(), comes.wait(), anchor.wait()) == (0, 0, 0), stays.said() + comes.said()
    members = [line["members"] for line in programs.lines("a") if "generation" in line]
    assert [{*names} for names in members] in ([{*"ab"}, {*"a"}, {*"ac"}], [{*"ab"}, {*"ac"}])
    came = next(line["step"] for line in programs.lines("a") if "c" in line.get("members", ()))
    assert 0 <= programs.step("b") < came < programs.step("one")
    return [programs.run(name) for name in ("one", "a", "c")]


def assert_as_one(programs: Programs, runs: list[Recipe]) -> None:
    assert [run["status"] for run in runs] == ["completed"] * 3
    for run in runs[1:]:
        assert {key: run[key] for key in ALIKE} == {key: runs[0][key] for key in ALIKE}
    digests = [
        {line["commit"]: line["digest"] for line in programs.lines(name) if "commit" in line}
        for name in ("one", "a", "b", "c")
    ]
    assert sorted(digests[0]) == list(range(runs[0]["steps"]))
    for found in digests[1:]:
        assert found and found.items() <= digests[0].items()
    assert equal(programs.weights("one"), programs.weights("a"))
    assert equal(programs.weights("one"), programs.weights("c"))


def test_exact_sums_give_the_bits_of_one_process_after_a_kill_and_a_join(
    programs: Programs, swarm_recipe: Recipe
) -> None:
    swarm_recipe["phases"][0]["passes"], swarm_recipe["phases"][1]["passes"] = 3, 1
    runs = train_alone_and_with_a_kill_and_a_join(programs, swarm_recipe)
    assert runs[0]["steps"] == 3 * 12 + 4
    assert_as_one(programs, runs)


def test_the_plateau_rule_switches_everywhere_at_the_step_of_one_process(
    programs: Programs, swarm_recipe: Recipe
) -> None:
    swarm_recipe["phases"][0] |= {"passes": 8, "lr": {"kind": "constant", "lr": 0.05}}
    swarm_recipe["phases"][1]["passes"] = 1
    swarm_recipe["switch"] = {
        "rule": "plateau", "window": 4, "earliest": 0.1, "accuracy_slope": 100.0,
        "loss_slope": 100.0,
    }  # fmt: skip
    runs = train_alone_and_with_a_kill_and_a_join(programs, swarm_recipe)
    [switch] = runs[0]["switches"][:1]
    assert switch["reason"].startswith("plateau")
    assert switch["step"] < 8 * 12  # before the planned end of the phase
    assert runs[0]["phases"][1]["first_step"] == switch["step"]
    assert any(look["verdict"] and look["verdict"]["fired"] for look in runs[0]["trace"])
    assert_as_one(programs, runs)
