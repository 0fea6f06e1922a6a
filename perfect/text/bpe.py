"""Byte-level BPE with GPT-2's vocabulary, by the package `tokenizers` (the extra .[llm]).

The token of a merge has the id 256 + the merge's line, so the first N ids are a smaller vocabulary:
small models use `read_bpe(folder, 1024)`. There are no special tokens, so "<|endoftext|>" in a text
is encoded like any other letters.
"""

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from loaders.errors import SourceError

try:
    import tokenizers
except ModuleNotFoundError:  # only runs on text need it
    tokenizers = None

log = logging.getLogger(__name__)

BYTES = 256
CHUNK = re.compile(r".{1000,}?\S(?= \S)|.+", re.DOTALL)
"""A part of a text that ends where no token can cross: between a word and one space before the
next. One long text at once takes three times as long, and a gigabyte."""


class Bpe:
    """Turns text into ids below `vocabulary`."""

    def __init__(self, ids: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> None:
        """`ids` maps each token, spelt with a letter for each byte, to its id. `merges` are pairs
        of tokens, the earliest first."""
        assert tokenizers is not None, "read_bpe checks this"
        self.vocabulary = len(ids)
        self._ids, self._merges = ids, merges
        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(dict(ids), list(merges)))
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.pre_tokenizer = byte_level

    def encode(self, text: str, what: str = "") -> NDArray[np.int32]:
        """`what`: the label of a progress bar; "" shows none."""
        chunks: list[str] = CHUNK.findall(text)
        ids: list[int] = []
        for chunk in with_progress_bar(chunks, what) if what else chunks:
            ids += self._tokenizer.encode(chunk).ids
        return np.asarray(ids, dtype=np.int32)

    def fingerprint(self) -> bytes:
        """Return a hash that is different for every vocabulary."""
        ranks = {pair: rank for rank, pair in enumerate(self._merges)}
        content = (sorted(self._ids.items()), sorted(ranks.items()))
        return hashlib.sha256(repr(content).encode()).digest()


def read_bpe(folder: Path, vocabulary: int | None = None) -> Bpe:
    """Read the vocabulary in `folder` (encoder.json, vocab.bpe), or only its first entries."""
    if tokenizers is None:
        raise SourceError("reading text needs tokenizers: pip install '.[llm]'")
    try:
        ids = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
        lines = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{folder} does not hold GPT-2's vocabulary: {error}; put encoder.json and vocab.bpe"
            " there"
        ) from error
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [
        (left, right) for left, _, right in (line.partition(" ") for line in lines[1:] if line)
    ]
    needed = (*letters, *(token for a, b in merges for token in (a, b, a + b)))
    missing = [token for token in needed if token not in ids]
    if missing:
        raise SourceError(
            f"{folder}: encoder.json lacks {missing[0]!r}, which vocab.bpe needs: give two files of"
            " the same vocabulary"
        )
    if sorted(ids.values()) != list(range(len(ids))):
        raise SourceError(
            f"{folder}: the ids in encoder.json are not 0 to {len(ids) - 1}: give GPT-2's own file"
        )
    if vocabulary is not None:
        if not BYTES <= vocabulary <= len(ids):
            raise SourceError(
                f"a vocabulary of {vocabulary} cannot be cut out of the one in {folder}: give"
                f" {BYTES} (the bytes) to {len(ids)} (all entries)"
            )
        ids = {token: number for token, number in ids.items() if number < vocabulary}
        if any(letter not in ids for letter in letters):
            raise SourceError(
                f"{folder}: the first {BYTES} ids in encoder.json are not the bytes: give GPT-2's"
                " own file"
            )
        merges = [(a, b) for a, b in merges if {a, b, a + b} <= ids.keys()]
    return Bpe(ids, merges)


def with_progress_bar(texts: Sequence[str], what: str) -> Iterable[str]:
    """Return the texts. While they are taken, a terminal shows how many are left; it does not with
    `perfect-train -q`, nor where several jobs begin at once, in threads of their own."""
    console = Console(stderr=True)
    alone = threading.current_thread() is threading.main_thread()
    if not (alone and console.is_terminal and log.isEnabledFor(logging.WARNING)):
        return texts
    return track(texts, what, console=console, transient=True)


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
    whole = hashlib.sha256(bpe.fingerprint())
    whole.update(f"{kind}{text}".encode())
    cache = file.with_name(f"{file.name}.{whole.hexdigest()[:16]}.npy")
    try:
        ids = np.load(cache, allow_pickle=False)
        if ids.dtype == np.int32 and ids.ndim == 1:
            return ids
    except (OSError, ValueError, EOFError):
        log.debug("%s is missing or damaged: the text is encoded", cache)
    ids = encode(text)
    _save(cache, ids)
    return ids


def _save(file: Path, ids: NDArray[np.int32]) -> None:
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as opened:
            np.save(opened, ids)
        os.replace(part, file)  # several ranks may write it, and none must read half a file
    except OSError as error:
        log.info("could not write %s (%s): the text is encoded anew each time", file, error)
