"""What all commands have in common: how they begin, and how Ctrl-C ends them.

The file of a command imports at its top only what its options need, so that --help and a wrong
option are answered at once. The modules that do the work are imported when the work begins.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import shtab

from perfect.version import own_version

if TYPE_CHECKING:
    from rich.console import Console

TRACEBACKS = logging.getLogger("perfect.tracebacks")
"""--traceback lets this be seen."""


def new_parser(name: str, about: str) -> argparse.ArgumentParser:
    """Return the parser of a command, with the options that every command has."""
    parser = argparse.ArgumentParser(prog=name, description=about)
    parser.add_argument("--version", action="version", version=f"%(prog)s {own_version()}")
    shtab.add_argument_to(parser, "--print-completion")
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    do: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Read the options, do what they say, and return the exit code. Ctrl-C: a line, and 130."""
    args = parser.parse_args(argv)
    try:
        return do(args)
    except KeyboardInterrupt:
        sys.stderr.write(f"{parser.prog}: stopped by Ctrl-C\n")
        return 130


def print_plain(console: "Console", text: str, style: str | None = None) -> None:
    """Print the text as it is: brackets in an error are not markup, and a path is not broken."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def show_traceback() -> None:
    """Show where the error that is handled now came from, if the user has asked for that."""
    TRACEBACKS.debug("", exc_info=True)


@contextmanager
def handled(number: int, handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call `handle` for this signal in this block. Only in the main thread can that be said."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)


def importing() -> AbstractContextManager[None]:
    """Ctrl-C ends the program at once in this block. Nothing has begun there, and a library whose
    import is interrupted may raise any other error."""
    return handled(signal.SIGINT, _leave)


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.stderr.write("stopped by Ctrl-C before anything began\n")
    sys.stderr.flush()
    os._exit(130)


def silence_lightning() -> None:
    """Let Lightning print errors only, in a command that trains in order to look at steps."""
    warnings.filterwarnings("ignore", module="lightning")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
