"""`python -m loaders.convert SOURCE OUT.beton` writes any pictures in FFCV's format.

SOURCE is a folder CLASS/NAME.jpg, a .tar, the folder of CIFAR-10, or `module:function`, a function
that returns any map-style data set of (picture, label). `backend="ffcv"` reads OUT.beton. An error
is said in one line, with exit code 2, and OUT.beton is then what it was before.
"""

import argparse
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from loaders.backends import open_source
from loaders.backends.beton import Encoding, Mode, Samples, convert
from loaders.errors import LoaderError, SourceError
from loaders.sources.datasets import CIFAR10_FOLDER, PictureArrays, cifar10


def find_source(text: str, test: bool = False) -> Samples:
    """The data set that SOURCE names: a folder, a .tar, CIFAR-10's folder, or `module:function`."""
    path = Path(text)
    root = path.parent if path.name == CIFAR10_FOLDER else path
    if (root / CIFAR10_FOLDER).is_dir():
        return cifar10(root, train=not test)
    if test:
        raise SourceError(
            f"--test chooses the test part of CIFAR-10, but {text} is no folder of CIFAR-10: leave"
            " --test out"
        )
    if path.exists():
        return open_source(path)
    if ":" not in text:
        raise SourceError(
            f"there is no {text}: give a folder CLASS/NAME.jpg, a .tar, the folder of CIFAR-10, or"
            " module:function"
        )
    try:
        made = pkgutil.resolve_name(text)()
    except Exception as error:  # whatever somebody's code raises
        raise SourceError(f"{text} gives no data set: {type(error).__name__}: {error}") from error
    if not hasattr(made, "__len__") or not hasattr(made, "__getitem__"):
        raise SourceError(
            f"{text} gives {type(made).__name__}, not a data set with len() and [i]: return one"
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    started = time.perf_counter()
    try:
        _check(given)
        source = find_source(given.source, given.test)
        mode: Mode = given.mode or ("raw" if isinstance(source, PictureArrays) else "jpg")
        if mode == "raw" and given.quality is not None:
            raise SourceError("--quality has no effect on --mode raw: leave it out")
        encoding = Encoding(mode, given.max_side, given.quality)
        with _progress(len(source)) as advance:
            written = convert(source, given.out, encoding, given.workers, advance)
    except (LoaderError, OSError) as error:
        sys.stderr.write(f"convert: {' '.join(str(error).split())}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("convert: interrupted; nothing was written\n")
        return 130
    kept = f" (JPEGs kept as they were: {written.kept})" if written.kept else ""
    sys.stdout.write(
        f"{given.out}: pictures: {written.pictures}{kept}, bytes: {written.file_bytes},"
        f" {time.perf_counter() - started:.1f} s\n"
    )
    return 0


def _check(given: argparse.Namespace) -> None:
    if given.out.suffix != ".beton":
        raise SourceError(f"{given.out} does not end in .beton: give such a name")
    if not given.out.parent.is_dir():
        raise SourceError(f"there is no folder {given.out.parent} to write to: make it first")
    if given.out.is_dir():
        raise SourceError(f"{given.out} is a folder: give the name of a file")
    if given.out.exists() and not given.force:
        raise SourceError(f"{given.out} exists: give --force to replace it")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a bar in a terminal; elsewhere write a line after each tenth of the pictures."""
    console = Console(stderr=True)
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("pictures", total=total)
            yield lambda: bar.advance(task)
        return
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done * 10 // total != (done - 1) * 10 // total:
            sys.stderr.write(f"pictures: {done} of {total}\n")

    yield advance


def _parser() -> argparse.ArgumentParser:
    def number(least: int, most: int) -> Callable[[str], int]:
        def whole(text: str) -> int:
            if not text.isdecimal() or not least <= int(text) <= most:
                raise argparse.ArgumentTypeError(
                    f"{text} is not a whole number from {least} to {most}"
                )
            return int(text)

        return whole

    parser = argparse.ArgumentParser(
        "python -m loaders.convert", description="Pictures -> FFCV's format."
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="folder CLASS/NAME.jpg, .tar, CIFAR-10, module:function")
    add("out", metavar="OUT.beton", type=Path)
    add("--mode", choices=("jpg", "raw"), help="how to store pixels (jpg; raw for CIFAR-10)")
    add(
        "--max-side",
        type=number(1, 16384),
        metavar="N",
        help="shrink pictures to at most N pixels a side",
    )
    add("--quality", type=number(1, 100), metavar="Q", help="encode JPEGs again, with this quality")
    add("--workers", type=number(1, 256), default=os.cpu_count() or 1, metavar="N")
    add("--test", action="store_true", help="CIFAR-10's test part instead of its training part")
    add("--force", action="store_true", help="replace OUT.beton if it is there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
