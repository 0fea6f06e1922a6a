"""Folders that a stranger made: no command runs code out of them or ends in a traceback."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from perfect import replay
from perfect.assembly.run import build_module
from perfect.config.schema import RunConfig
from perfect.errors import BuildError

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


def test_with_trust_the_class_is_checked_before_it_is_made(
    peer: Path, make_pictures: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("train", "val"):
        make_pictures(Path("pictures") / part, {"a": 20, "b": 20}, size=8)
    write_config(peer, model=SHELL, loader={"batch_size": 4})
    assert replay.main(["--trust", str(peer)]) == 2
    assert "'os.system' is not a class" in capsys.readouterr().err
    Path("honest.py").write_text("class Net: ...")
    write_config(peer, model={"class_path": "honest.Net"}, loader={"batch_size": 4})
    assert replay.main(["--trust", str(peer)]) == 2
    assert "honest.Net is not a lightning.LightningModule" in capsys.readouterr().err


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
