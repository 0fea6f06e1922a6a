"""A process that is forked from the warm one can tell no difference to one that was started."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.products import every_value
from support.warm_python import WarmPython

FACTS = """
import json, os, random, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "name": __name__, "path": sys.path[0], "folder": os.getcwd(),
    "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(), "said": sys.stdin.read(),
    "environment": {**os.environ}, "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "ctrl-c": str(signal.getsignal(signal.SIGINT)), "threads": threading.active_count(),
    "open": [os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in range(3)],
}))
"""
ENDS = {
    "nothing": "", "a number": "sys.exit(3)", "a text": "sys.exit('no')", "none": "sys.exit()",
    "closed": "sys.stdout.close()",
    "an error": "raise ValueError('no')", "Ctrl-C": "raise KeyboardInterrupt",
    "killed": "os.kill(os.getpid(), 9)", "at exit": "atexit.register(print, 'end')",
    "a thread": "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "a child": "print(os.waitpid(os.fork() or os._exit(4), 0)[1])",
}  # fmt: skip


@pytest.fixture
def both(warm_python: WarmPython) -> Any:
    """`both(argv, ...)`: what a process says and how it ends, forked and started."""

    def run(argv: list[str], **given: Any) -> list[tuple[int, str, str]]:
        results = []
        for warm_python.cold in (False, True):
            done = subprocess.run(
                [sys.executable, *argv], capture_output=True, text=True, check=False, **given
            )
            results.append((done.returncode, done.stdout, done.stderr))
        return results

    return run


@pytest.mark.parametrize("way, session", every_value(["-c", "a script", "-m"], [False, True]))
def test_it_has_the_surroundings_of_a_process_that_was_started(
    way: str, session: bool, both: Any, tmp_path: Path
) -> None:
    script = tmp_path / "facts.py"
    script.write_text(FACTS)
    program = {"-c": ["-c", FACTS], "a script": [str(script)], "-m": ["-m", "facts"]}[way]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "ONLY_HERE": "1"}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        forked, started = both(
            [*program, "one", "--two"],
            cwd=tmp_path, env=environment, input="hello", start_new_session=session,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    assert forked == started
    assert '"ONLY_HERE": "1"' in forked[1] and '"said": "hello"' in forked[1]


@pytest.mark.parametrize("how", ENDS)
def test_it_ends_as_a_process_that_was_started(how: str, both: Any) -> None:
    forked, started = both(["-c", f"import atexit, os, sys, threading, time\n{ENDS[how]}"])
    assert forked == started


def test_it_is_forked_and_a_cold_one_is_not(both: Any) -> None:
    forked, started = both(["-c", "import sys; print('lightning' in sys.modules)"])
    assert (forked[1], started[1]) == ("True\n", "False\n")
