"""The folder of a run: the configuration it belongs to, its status, and its newest checkpoint.

config.yaml  all keys; the folder belongs to this configuration alone, but `offload` may change, and
             what `elastic` says of this node
last.ckpt    the newest checkpoint, from which the run is resumed
final.ckpt   the weights of the finished run, as they were judged
metrics.csv  one row for each step that logged
run.json     the results of the run         report.html  the same as a page
memory-N.svg a picture of a plan of an offloading run
elastic/     the log of a peer of a swarm
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

import yaml
from lightning.pytorch.utilities import rank_zero_only

from perfect.config.elastic_schema import OF_A_NODE
from perfect.config.yaml_reader import read_dump, shown
from perfect.errors import ConfigError, FolderError
from perfect.report.results import read_record
from perfect.runs.record import write_run, write_whole
from trainers.read_checkpoint import CheckpointRefused, read_checkpoint

HOW = ("offload",)
"""These sections do not change the results of a run, so it may be resumed with other ones."""
State = Literal["new", "begun", "completed"]


class RunFolder:
    def __init__(self, path: Path, also: Collection[str] = ()) -> None:
        """`also` are names of files that others keep in the folder."""
        self.path = path
        self._also = frozenset(also)
        self.config = path / "config.yaml"
        self.checkpoint = path / "last.ckpt"
        self.final = path / "final.ckpt"
        self.run = path / "run.json"
        self.report = path / "report.html"

    def open(self, config: dict[str, Any]) -> State:
        """Return the status of the run, or raise `FolderError` if it may not run here."""
        if not is_folder(self.path):
            return "new"
        half_begun = {self.config.with_suffix(".part").name}
        if {entry.name for entry in self.path.iterdir()} - self._also <= half_begun:
            return "new"
        if not self.config.exists():
            raise FolderError(
                f"{self.path} is not empty and holds no run (no config.yaml): give another --out"
            )
        check_same(self.config, "a run of another configuration", config, _without_how)
        return "completed" if self.read().get("status") == "completed" else "begun"

    @rank_zero_only
    def begin(self, config: dict[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        if not self.config.exists() or self.config.read_text("utf-8") != text:
            write_whole(self.config, text)

    def checkpoint_step(self) -> int | None:
        """Return the optimizer steps of the newest checkpoint, or None if there is none."""
        if not self.checkpoint.exists():
            return None
        try:
            return read_checkpoint(self.checkpoint, "global_step", int)
        except CheckpointRefused as error:
            raise FolderError(str(error)) from error

    def resumed_at(self, step: int | None) -> list[int]:
        before = list(self.read().get("resumed_at", []))
        return before if step is None else [*before, step]

    def read(self) -> dict[str, Any]:
        if not self.run.exists():
            return {}
        try:
            run = read_record(self.run)
            if not isinstance(run, dict) or not isinstance(run.get("resumed_at", []), list):
                raise ValueError("it is not the record of a run")
            return run
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deep
            raise FolderError(f"{self.run} is damaged ({error}): delete it to go on") from error

    @rank_zero_only
    def write(self, run: dict[str, Any]) -> None:
        write_run(self.run, run)


def is_folder(path: Path) -> bool:
    """Return whether this folder is there. Raise `FolderError` if it cannot be."""
    try:
        str(path.absolute()).encode()  # what a run writes names it, and is UTF-8
        path.stat()
    except FileNotFoundError:
        return False
    except (UnicodeError, OSError) as error:
        why = getattr(error, "strerror", "its name is not UTF-8")
        raise FolderError(
            f"{shown(str(path))} cannot be used ({why}): give another --out"
        ) from error
    if not path.is_dir():
        raise FolderError(f"{path} is a file: give a folder as --out")
    return True


def _without_how(config: Any) -> Any:
    """Return the configuration without the keys that do not change the results."""
    if not isinstance(config, dict):
        return config
    kept = {name: section for name, section in config.items() if name not in HOW}
    if isinstance(elastic := kept.get("elastic"), dict):
        kept["elastic"] = {key: value for key, value in elastic.items() if key not in OF_A_NODE}
    return kept


def check_same(begun_with: Path, what: str, mine: Any, kept: Callable[[Any], Any]) -> None:
    """Raise `FolderError` if a folder was begun with `what`: another configuration than `mine`, in
    the keys that `kept` keeps."""
    try:
        theirs = read_dump(begun_with)
    except ConfigError as error:
        raise FolderError(f"{begun_with} is damaged ({error}): give another --out") from error
    if odd := differences(kept(theirs), kept(mine)):
        more = "; ..." if len(odd) > 5 else ""
        raise FolderError(
            f"{begun_with.parent} holds {what}: {'; '.join(odd[:5])}{more}. Give another --out, or"
            " delete the folder"
        )


def differences(theirs: Any, mine: Any, key: str = "") -> list[str]:
    """Return one sentence for each key whose value differs."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        return [
            line
            for name in {**theirs, **mine}
            for line in differences(theirs.get(name), mine.get(name), f"{key}.{name}".lstrip("."))
        ]
    if isinstance(theirs, list) and isinstance(mine, list) and len(theirs) == len(mine):
        return [
            line
            for number, pair in enumerate(zip(theirs, mine, strict=True))
            for line in differences(*pair, f"{key}.{number}")
        ]
    return [] if theirs == mine else [shown(f"{key} is {theirs!r} there, {mine!r} here")]
