"""What a process that is killed leaves behind, and who may open what it shares meanwhile."""

import os
import socket
import stat
from multiprocessing import util
from pathlib import Path

import pytest
import torch

from loaders.sharing.lent_blocks import LentBlocks
from loaders.sharing.parcels import pack
from loaders.workers.fork_server import MARK, prepare
from loaders.workers.staging import _nameless_file


def server(folder: Path, *, marked: bool = True) -> socket.socket:
    folder.mkdir()
    if marked:
        (folder / MARK).touch()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "listener-1"))
    listening.listen()
    return listening


def test_a_fork_servers_folder_is_removed_when_nobody_listens_there_and_it_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "pymp-mine"
    mine.mkdir()
    monkeypatch.setattr(util, "get_temp_dir", lambda: str(mine))
    server(tmp_path / "pymp-dead").close()
    server(tmp_path / "pymp-of-others", marked=False).close()
    (tmp_path / "pymp-begins").mkdir()
    (tmp_path / "pymp-begins" / MARK).touch()
    (tmp_path / "pymp-link").symlink_to(tmp_path / "pymp-begins")
    with server(tmp_path / "pymp-alive") as alive:
        prepare("json")
        alive.setblocking(False)
        with pytest.raises(BlockingIOError):  # It was asked, and did not notice.
            alive.accept()
    kept = {"pymp-mine", "pymp-of-others", "pymp-begins", "pymp-link", "pymp-alive"}
    assert {path.name for path in tmp_path.iterdir()} == kept


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="nameless files as Linux has them")
def test_nobody_else_may_open_memory_that_processes_share() -> None:
    _, block = LentBlocks().ship(pack({"x": torch.ones(4)}))
    assert block is not None
    for file in (block, _nameless_file()):
        assert stat.S_IMODE(os.fstat(file).st_mode) == 0o600
        os.close(file)
