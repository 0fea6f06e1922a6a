"""Folders that a stranger made: no command runs code out of them or ends in a traceback."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from perfect import compare, list_runs, replay
from perfect.assembly.run import build_module
from perfect.config.schema import RunConfig
from perfect.errors import BuildError, FolderError
from perfect.report.report import write_report
from perfect.runs.folder import RunFolder
from perfect.runs.record import RunLog

Recipe = dict[str, Any]


# ---- perfect-replay -----------------------------------------------------------------------------


class Touch:
    """What a stranger may have put into a checkpoint."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a peer of a swarm, which has committed a step. Whatever runs a stranger's code
    leaves the file `ran`."""
    monkeypatch.chdir(tmp_path)
    Path("strange.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    (tmp_path / "peer/elastic").mkdir(parents=True)
    log = [
        {"run": {"lanes": 1, "sum": "fast", "micro": 1}, "time": 0.0},
        {"commit": 0, "added": [["a", [0]]], "digest": "0", "time": 1.0},
    ]
    text = "".join(json.dumps(line) + "\n" for line in log)
    (tmp_path / "peer/elastic/a.jsonl").write_text(text)
    write_config(tmp_path / "peer")
    yield tmp_path / "peer"
    assert not Path("ran").exists(), "a stranger's code has run"


def write_config(folder: Path, **sections: Any) -> None:
    recipe: Recipe = {
        "model": {"name": "pilot"},
        "data": {"name": "imagefolder", "root": "pictures", "picture_size": 8},
        "phases": [{"name": "only", "steps": 1}],
        **sections,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))


SHELL = {"class_path": "os.system", "init_args": {"command": "touch ran"}}
IMPORTED = {"class_path": "strange.Class"}
IN_AN_ARGUMENT = {"class_path": "torch.nn.Identity", "init_args": {"args": [IMPORTED]}}
SECTIONS = [
    *({"model": named} for named in (SHELL, IMPORTED)),
    *({"data": named} for named in (SHELL, IMPORTED)),
    *({"augment": [{"name": "flip"}, named]} for named in (SHELL, IMPORTED, IN_AN_ARGUMENT)),
]


@pytest.mark.parametrize("sections", SECTIONS, ids=str)
def test_a_replay_imports_nothing_that_the_folder_names(
    sections: Recipe, peer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(peer, **sections)
    assert replay.main([str(peer)]) == 2
    [_, said] = capsys.readouterr().err.splitlines()
    named = "os.system" if "os.system" in str(sections) else "strange.Class"
    assert str(peer / "config.yaml") in said and named in said and "give --trust" in said


@pytest.mark.parametrize("name", ["os.system", "pathlib.Path", "torch.nn.Linear", "os", "builtins"])
def test_what_is_not_the_class_that_is_needed_is_never_called(name: str, peer: Path) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"class_path": name, "init_args": {"command": "touch ran"}},
            "data": {"name": "cifar10"},
            "phases": [{"name": "only", "steps": 1}],
        }
    )
    with pytest.raises(BuildError, match=r"is not a (class|lightning)|cannot be imported"):
        build_module(config, 3)


FINALS = {
    "objects": {"state_dict": {}, "global_step": 1, "extra": Touch()},
    "a list": [1, 2],
    "a step of text": {"state_dict": {}, "global_step": "x"},
    "weights in a list": {"state_dict": [], "global_step": 1},
    "nothing": None,
}


@pytest.mark.parametrize("content", FINALS.values(), ids=FINALS.keys())
def test_a_replay_refuses_final_weights_by_the_name_of_their_file(
    content: Any, peer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, peer / "final.ckpt")
    assert replay.main([str(peer)]) == 2
    [_, said] = capsys.readouterr().err.splitlines()
    assert str(peer / "final.ckpt") in said


# ---- perfect-compare, perfect-runs --------------------------------------------------------------

DONE = {"status": "completed", "wall_seconds": 100.0, "config": {"phases": [{"reuse": 1}]}}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with two runs of ours, `a` and `b`."""
    for name in "ab":
        make_run(tmp_path / "runs" / name, json.dumps(DONE))
    return tmp_path / "runs"


def make_run(folder: Path, record: str | bytes, metrics: str | bytes = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    (folder / "run.json").write_bytes(record if isinstance(record, bytes) else record.encode())
    if metrics:
        text = metrics if isinstance(metrics, bytes) else metrics.encode()
        (folder / "metrics.csv").write_bytes(text)
    return folder


def looked_at(command: Any, capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, str]:
    """Return the exit code of a command, and its only line about what is wrong."""
    code = command.main(given)
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err, "no name steers the terminal"
    lines = said.err.splitlines()
    assert len(lines) == (1 if code else 0), said.err
    return code, "".join(lines)


def with_(**changes: Any) -> str:
    return json.dumps(DONE | changes)


PHASE = {"name": "x", "reuse": 1, "first_step": 0, "last_step": 9}
BAD_RECORDS: dict[str, str | bytes] = {
    "a number of 400 digits": with_(wall_seconds=10**400),
    "a number of 5,000 digits": with_().replace("100.0", "9" * 5000),
    "an infinity": with_().replace("100.0", "1e999"),
    "a nest that ends the parser": with_(trace=0).replace(
        "0}", "[" * 100_000 + "]" * 100_000 + "}"
    ),
    "a nest that ends the writer": with_(config=json.loads("[" * 99 + "]" * 99)),
    "a nest in the configuration": with_(chosen={"x": json.loads("[" * 99 + "]" * 99)}),
    "half a surrogate pair": with_(name="\ud800"),
    "half a surrogate pair in a key": with_(config={"\udfff": 1}),
    "not UTF-8": with_().encode() + b"\xff",
    "UTF-16": with_().encode("utf-16"),
    "no object": "[1]",
    "nothing": "",
    "text for a number": with_(steps="many"),
    "a list where a word is": with_(accuracy_on=["test"]),
    "a mapping where a status is": with_(status={}),
    "a status of a million letters": with_(status="x" * 1_000_000),
    "rows that are none": with_(phases=[1, None, "x"]),
    "no rows in the configuration": with_(config={"phases": [None]}),
    "a mapping of rows": with_(config={"phases": {"x": 1}}),
    "a step of text": with_(phases=[PHASE | {"first_step": "x"}]),
    "a rate of text": with_(phases=[PHASE | {"lr_start": "x"}]),
    "bytes of text": with_(offload={"peak_bytes": "x"}),
    "seconds of text": with_(offload={"transfer_seconds": []}),
}
BAD_METRICS: dict[str, str | bytes] = {
    "not UTF-8": b"step,lr\n1,\xff\n",
    "a cell of 200,000 letters": "step,lr\n1," + "x" * 200_000,
    "no steps": "lr\n1\n",
    "a list": "step,lr\n1,[]\n",
}
BAD_RUNS = [
    *(pytest.param(bad, "", id=f"run.json: {name}") for name, bad in BAD_RECORDS.items()),
    *(pytest.param(with_(), bad, id=f"metrics.csv: {name}") for name, bad in BAD_METRICS.items()),
]


@pytest.mark.parametrize(("record", "metrics"), BAD_RUNS)
def test_a_damaged_run_is_a_line_and_the_others_are_shown(
    record: str | bytes, metrics: str | bytes, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = str(make_run(runs / "bad", record, metrics))
    code, said = looked_at(compare, capsys, str(runs / "a"), bad, str(runs / "b"))
    assert code == 2 and said.startswith(f"compare: {bad}: ") and len(said) < 1000
    shown = (runs / "compare.html").read_text(encoding="utf-8")
    assert "<td>a</td>" not in shown and "<b>100.0 s</b>" not in shown
    assert str(runs / "b") in shown and bad not in shown
    code, said = looked_at(list_runs, capsys, "ls", str(runs))
    assert code == 2 and said.startswith(f"perfect-runs: {bad}: ") and len(said) < 1000
    code, said = looked_at(list_runs, capsys, "show", bad)
    assert code == 2 and said.startswith(f"perfect-runs: {bad}: ")


NASTY = "<script>'\"[/red]\x1b[2J\x00$_{\N{RIGHT-TO-LEFT OVERRIDE}"
NAMES = [NASTY, "x" * 250, "\N{SNOWMAN}" * 80, "\udcff\udcfe", "[/]", " ", "-x", "a\nb"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_of_a_folder_or_a_run_is_shown_as_text(
    name: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = json.dumps(DONE | {"environment": {NASTY: NASTY}, "error": NASTY, "seed": NASTY})
    strange = str(make_run(runs / name.translate({0: None, ord("/"): None}), named))
    inside = make_run(runs / "c", json.dumps(DONE | {"name": NASTY, "config": {NASTY: NASTY}}))
    assert looked_at(compare, capsys, strange, str(inside), str(runs / "a")) == (0, "")
    page = (runs / "compare.html").read_bytes().decode()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert len(json.loads((runs / "compare.json").read_text())) == 3
    assert looked_at(list_runs, capsys, "ls", str(runs)) == (0, "")
    assert looked_at(list_runs, capsys, "show", strange) == (0, "")
    write_report(Path(strange))
    assert "<script" not in (Path(strange) / "report.html").read_bytes().decode()


def test_folders_that_cannot_be_looked_into_are_a_line(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "loop").symlink_to(runs / "loop")
    os.mkfifo(make_run(runs / "fifo", with_()) / "metrics.csv")
    (make_run(runs / "endless", "") / "run.json").unlink()
    (runs / "endless/run.json").symlink_to("/dev/zero")
    for name in ("loop", "endless", "y" * 256, "z/" * 3000):
        code, said = looked_at(compare, capsys, str(runs / "a"), str(runs / name))
        assert code == 2 and said.startswith(f"compare: {runs / name}: ")
        for action in ("ls", "show", "rm"):
            code, said = looked_at(list_runs, capsys, action, str(runs / name))
            assert code == (0 if (action, name) == ("ls", "endless") else 2)
    assert looked_at(compare, capsys, str(runs / "a"), str(runs / "fifo")) == (0, "")


def test_an_enormous_record_is_refused_by_its_size(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("perfect.report.results.MOST_BYTES", 1 << 20)
    big = make_run(runs / "big", with_(error="x" * (1 << 20)))
    assert "has more than 1 MiB" in looked_at(compare, capsys, str(runs / "a"), str(big))[1]


# ---- last.ckpt ----------------------------------------------------------------------------------

GOOD: Recipe = {
    "global_step": 5, "epoch": 1, "state_dict": {}, "loops": {}, "callbacks": {},
    "optimizer_states": [], "lr_schedulers": [],
}  # fmt: skip
CHECKPOINTS = {
    "a list": [1, 2],
    "a number": 5,
    "nothing": {},
    **{f"{key} of text": GOOD | {key: "x"} for key in GOOD},
    **{f"no {key}": GOOD | {key: None} for key in GOOD},
    "true for a step": GOOD | {"global_step": True},
    "a fraction of a step": GOOD | {"global_step": 1.5},
    "infinitely many steps": GOOD | {"global_step": float("inf")},
    "objects": GOOD | {"more": Touch()},
}


@pytest.mark.parametrize("content", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_a_checkpoint_that_is_none_is_refused_by_its_name(content: Any, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    torch.save(content, folder.checkpoint)
    with pytest.raises(FolderError) as refused:
        folder.checkpoint_step()
    assert str(folder.checkpoint) in str(refused.value)
    assert "weights_only" not in str(refused.value), "torch advises to run the code of the file"
    torch.save(GOOD, folder.checkpoint)
    assert folder.checkpoint_step() == 5


def test_damaged_bytes_of_a_checkpoint_are_refused_by_its_name(tmp_path: Path) -> None:
    folder, rng = RunFolder(tmp_path), random.Random(0)
    torch.save(GOOD | {"state_dict": {"w": torch.zeros(9)}}, folder.checkpoint)
    whole = folder.checkpoint.read_bytes()
    refused = 0
    for _ in range(200):
        at = rng.randrange(len(whole))
        new = rng.choice([b"", b"\xff", b"\0" * 9, rng.randbytes(5)])
        folder.checkpoint.write_bytes(whole[:at] + new + whole[at + rng.randrange(9) :])
        try:
            assert folder.checkpoint_step() is not None
        except FolderError as error:
            refused += str(folder.checkpoint) in str(error)
    assert refused > 50


BOMB = "".join(
    f"{'abcdefghi'[n]}: &{n} [{', '.join([f'*{n - 1}'] * 9 * bool(n))}]\n" for n in range(9)
)
FILES = {
    "config.yaml": [
        "seed: [",
        "a: &a [1]\nb: [*a, *a]\n" * 9999,
        "- 1",
        "{" * 9999,
        BOMB,
        "d: 2001-99-99",
        f"d: {'9' * 5000}",
        f"d: {'1:' * 200}1",
    ],
    "run.json": ["[" * 99_999, "[]", '{"resumed_at": 5}', '{"name": "\\ud800"}', '{"a": 1'],
    "metrics.csv": ["lr\n1\n", "step\n5\n", "step,lr\n1,x\n", "step,lr\n1,2,3\n", "step\nx" * 9],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in FILES for text in FILES[name]],
                         ids=lambda text: text[:20])  # fmt: skip
def test_a_run_goes_on_from_no_damaged_file(name: str, text: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin({"seed": 0})
    (tmp_path / name).write_text(text)
    with pytest.raises(FolderError, match=rf"{name} is damaged"):
        folder.open({"seed": 0})
        folder.resumed_at(5)
        RunLog(tmp_path).resume(9)
