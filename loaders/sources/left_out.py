"""Which files of a folder or tar are read as pictures, and one line on those that are not."""

import logging
import posixpath
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

PICTURE_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".jpe", ".jfif", ".ppm",
    ".pgm", ".pbm", ".avif",
)  # fmt: skip
"""Files whose names end so, in capitals too, are read as pictures."""
NO_DATA = frozenset({"Thumbs.db", "desktop.ini"})


def is_picture(name: str) -> bool:
    return name.lower().endswith(PICTURE_SUFFIXES) and not is_hidden(name)


def is_hidden(name: str) -> bool:
    """Whether a file is one of those that systems put beside others, as .DS_Store and ._a.jpg."""
    base = name.rpartition("/")[2]
    return base.startswith(".") or base in NO_DATA


def tell_left_out(
    where: Path, others: Sequence[str], unlabelled: Sequence[str] = (), empty: Sequence[str] = ()
) -> None:
    """Say in one line what of `where` is not read: `others` do not end as pictures do, `unlabelled`
    pictures lie in no class's folder, and no picture is in the `empty` folders of classes."""
    parts: list[str] = []
    others = [name for name in others if not is_hidden(name)]
    if others:
        kinds = Counter(posixpath.splitext(name)[1] or "no suffix" for name in others)
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5))
        parts.append(
            f"files that do not end as pictures do ({len(others)}: {told}; the first is"
            f" {others[0]})"
        )
    if unlabelled:
        parts.append(
            f"pictures that lie in no class's folder ({len(unlabelled)}; the first is"
            f" {unlabelled[0]})"
        )
    if empty:
        parts.append(f"the classes without a picture {', '.join(empty[:5])}")
    if parts:
        log.warning("%s: not read are %s", where, "; ".join(parts))
