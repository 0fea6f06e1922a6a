"""What C++ writes to stderr while a swarm trains: gloo's lines go to a file, the rest is seen."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perfect.runs.swarm_figures import gloo_apart

GLOO = (
    "[/w/third_party/gloo/gloo/transport/tcp/debug_logger.cc:9] ERROR failed to connect\n"
    "[E1128 08:30:47.3 ProcessGroupGloo.cpp:69] Gloo connectFullMesh failed with Timeout\n"
)


def test_gloo_is_kept_out_of_the_terminal_and_nothing_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "stderr.log"
    for number in range(2):
        with gloo_apart(log):
            os.write(2, f"{GLOO}a real failure {number}\nno newline".encode())
            sys.stderr.write("python\n")
            assert "real" not in (now := capfd.readouterr().err) and "python" in now
        assert capfd.readouterr().err == f"a real failure {number}\nno newline"
        log.write_bytes(log.read_bytes() + b"\n")
    assert log.read_text().count(GLOO) == 2
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_a_death_is_seen_and_what_came_before_it_is_in_the_file(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from perfect.runs.swarm_figures import gloo_apart\n"
        "with gloo_apart(Path(sys.argv[1])):\n"
        "    os.write(2, b'terminate called after\\n'); os.abort()"
    )
    log = tmp_path / "stderr.log"
    done = subprocess.run([sys.executable, "-c", script, log], capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr
    assert log.read_text() == "terminate called after\n"
