"""What all commands have in common: how they begin, and how Ctrl-C ends them.

    options --> (imports of seconds, in `importing`) --> what the command does --> exit code

The file of a command imports at its top only what reads its options, so that --help and a wrong
option take no second. What does the work is imported where the command does it.
"""

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")
TRACEBACKS = logging.getLogger("perfect.tracebacks")
"""--traceback lets this be seen."""


def new_parser(name: str, about: str) -> argparse.ArgumentParser:
    """Return the parser of a command, with the options that every command has."""
    parser = argparse.ArgumentParser(prog=name, description=about)
    parser.add_argument("--version", action=_Version, help="print the version, and exit")
    parser.add_argument(
        "--print-completion",
        action=_Completion,
        choices=SHELLS,
        help="print what makes this shell complete the options, and exit",
    )
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    do: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Read the options, do what they say, and return the exit code. Ctrl-C is a line and 130."""
    args = parser.parse_args(argv)
    try:
        return do(args)
    except KeyboardInterrupt:
        sys.stderr.write(f"{parser.prog}: stopped by Ctrl-C\n")
        return 130


def show_traceback() -> None:
    """Show where the error that is handled now came from, if the user has asked for that."""
    TRACEBACKS.debug("", exc_info=True)


@contextmanager
def importing() -> Iterator[None]:
    """Ctrl-C ends the program at once in this block. Nothing has begun there, and a library whose
    import is interrupted may raise any other error."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.stderr.write("stopped by Ctrl-C before anything began\n")
    sys.stderr.flush()
    os._exit(130)


class _Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    def __init__(self, **given: Any) -> None:
        super().__init__(nargs=0, **given)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from perfect.version import own_version

        sys.stdout.write(f"{parser.prog} {own_version()}\n")
        parser.exit()


class _Completion(argparse.Action):
    """Prints the shell's completion of a command, made by `shtab`."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, *__: Any) -> None:
        import shtab

        sys.stdout.write(shtab.complete(parser, shell) + "\n")
        parser.exit()
