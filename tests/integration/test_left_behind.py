"""What a process that is killed leaves behind, and who may open what it shares meanwhile."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from loaders.sharing.lent_blocks import LentBlocks, pack

FOLDER = """
import sys
import tempfile
from multiprocessing import util
from loaders.workers import fork_server
tempfile.tempdir = sys.argv[1]
fork_server.prepare("json")
print(util.get_temp_dir(), flush=True)
sys.stdin.read()
"""


@contextmanager
def process_with_a_folder(temporary: Path) -> Iterator[Path]:
    """The folder of a process, which is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", FOLDER, str(temporary)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        try:
            yield Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_fork_servers_folder_is_removed_when_its_process_was_killed(tmp_path: Path) -> None:
    (tmp_path / "pymp-of-others").mkdir()
    (tmp_path / "pymp-link").symlink_to(tmp_path / "pymp-of-others")
    with process_with_a_folder(tmp_path) as alive:
        (alive / "listener-dead").touch()  # a server that has died does not end its process
        with process_with_a_folder(tmp_path) as killed:
            assert killed.is_dir()
        assert killed.is_dir()
        with process_with_a_folder(tmp_path) as last:
            kept = {"pymp-of-others", "pymp-link", alive.name, last.name}
            assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="nameless files as Linux has them")
def test_nobody_else_may_open_memory_that_processes_share() -> None:
    _, block = LentBlocks().ship(pack({"x": torch.ones(4)}))
    assert block is not None
    assert stat.S_IMODE(os.fstat(block).st_mode) == 0o600
    os.close(block)
