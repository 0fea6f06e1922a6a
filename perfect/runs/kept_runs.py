"""The folders of runs and grids as `perfect-runs` and the options --resume and --fresh handle them.

A process that trains in a folder holds it (trainers/folder_lock.py). Nothing here imports torch.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from perfect.errors import FolderError
from trainers.folder_lock import hold_folder

KINDS = ("config.yaml", "grid.yaml")
"""One of these makes a folder that of a run, or of a grid."""
GOES_ON = ("last.ckpt", "final.ckpt", "journal.jsonl", "elastic")
"""From one of these a run goes on, or is seen to be complete."""


def is_kept(folder: Path) -> bool:
    return any((folder / name).is_file() for name in KINDS)


def is_held(folder: Path) -> bool:
    """Whether a process trains in this folder now."""
    with hold_folder(folder) as free:
        return not free


def kept_below(root: Path) -> Iterator[Path]:
    """Yield the folders of runs and grids at `root` and below; a grid's jobs come after it."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            if is_kept(folder):
                yield folder
            if (folder / "config.yaml").is_file() or not folder.is_dir():
                continue
            entries = [e for e in folder.iterdir() if e.is_dir() and not e.is_symlink()]
            waiting += sorted(entries, reverse=True)
        except OSError:
            yield folder  # reading it says why it cannot be read


def check_resumable(folder: Path) -> None:
    """Raise `FolderError` if there is nothing in the folder to go on from."""
    if not (is_kept(folder) and any((folder / name).exists() for name in GOES_ON)):
        raise FolderError(
            f"--resume: {folder} holds no run with a checkpoint: leave out --resume to begin one"
        )


def put_aside(folder: Path) -> Path | None:
    """Rename the folder of a run, and return its new name; None if there was no run."""
    if not is_kept(folder):
        return None
    check_idle(folder)
    number = 1
    while (old := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    return folder.rename(old)


def copy_kept(folder: Path, to: Path) -> None:
    """Copy the folder of a run to a new place, whole or not at all."""
    check_idle(folder)
    if to.exists():
        raise FolderError(f"{to} exists: give a place where nothing is")
    part = to.with_name(f"{to.name}.part")
    if part.exists():
        raise FolderError(f"{part} exists, perhaps from a copy that was cut off: remove it first")
    try:
        shutil.copytree(folder, part, symlinks=True)
        part.rename(to)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise FolderError(f"{to} could not be written: {error}") from error


def check_idle(folder: Path) -> None:
    """Raise `FolderError` if the folder holds no run, or a process trains in it."""
    if not is_kept(folder):
        what = "holds no run" if folder.is_dir() else "is no folder"
        raise FolderError(f"{folder} {what}: perfect-runs ls lists those that there are")
    if is_held(folder):
        raise FolderError(f"a process trains in {folder}: end it first, with Ctrl-C")
