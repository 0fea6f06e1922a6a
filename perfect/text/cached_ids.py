"""Caches the ids of an encoded text beside it, as a numpy file.

Encoding 11 MB takes seconds. The file's name has a hash of everything that the ids depend on. If it
cannot be written, the text is encoded anew each time.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loaders.errors import SourceError
from perfect.text.bpe import Bpe

log = logging.getLogger(__name__)

Encode = Callable[[str], NDArray[np.int32]]


def read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{file} cannot be read: {error}") from error


def cached_ids(
    file: Path, text: str, bpe: Bpe, encode: Encode, kind: str = ""
) -> NDArray[np.int32]:
    """Return what `encode` makes of the text of this file. `kind` tells encodings apart."""
    cache = file.with_name(f"{file.name}.{_key(text, bpe, kind)}.npy")
    try:
        ids = np.load(cache, allow_pickle=False)
        if ids.dtype == np.int32 and ids.ndim == 1:
            return ids
    except (OSError, ValueError, EOFError):
        log.debug("%s is missing or damaged: the text is encoded", cache)
    ids = encode(text)
    _save(cache, ids)
    return ids


def _key(text: str, bpe: Bpe, kind: str) -> str:
    whole = hashlib.sha256(bpe.fingerprint())
    whole.update(f"{kind}{text}".encode())
    return whole.hexdigest()[:16]


def _save(file: Path, ids: NDArray[np.int32]) -> None:
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as opened:
            np.save(opened, ids)
        os.replace(part, file)  # several ranks may write it, and none must read half a file
    except OSError as error:
        log.info("could not write %s (%s): the text is encoded anew each time", file, error)
