"""Byte-level BPE with GPT-2's vocabulary: text -> ids and back, byte for byte.

    "It's 42"  --pieces-->  "It" "'s" " 42"  --UTF-8, one letter a byte-->  "It" "'s" "Ġ42"
               --merges, the earliest in vocab.bpe first-->  "It" "'s" "Ġ42"  --encoder.json--> ids

The token of a merge has the id 256 + the merge's line, so the first N ids are a smaller vocabulary:
small models use `read_bpe(folder, 1024)`. There are no special tokens, so "<|endoftext|>" in a text
is encoded like any other letters. A word is merged only once; later it is looked up.
"""

import hashlib
import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loaders.errors import SourceError
from perfect.bars import counted

BYTES = 256
# These are Unicode's White_Space. Python's \s also contains the four separators 1C to 1F.
SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


class Bpe:
    """Turns text into ids below `vocabulary`, and back."""

    def __init__(self, ids: Mapping[str, int], merges: Iterable[tuple[str, str]]) -> None:
        """`ids` maps each token, spelt with a letter for each byte, to its id. `merges` are pairs
        of tokens, the earliest first."""
        self.vocabulary = len(ids)
        self._ids = ids
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._letters = byte_letters()
        self._bytes = {letter: byte for byte, letter in enumerate(self._letters)}
        self._tokens = {number: token for token, number in ids.items()}
        self._pieces = piece_pattern()
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str, what: str = "") -> NDArray[np.int32]:
        """`what`: what a bar says while a long text is encoded; "" shows none."""
        found: list[int] = []
        pieces: list[str] = self._pieces.findall(text)
        for piece in counted(pieces, what) if what else pieces:
            ids = self._known.get(piece)
            if ids is None:
                ids = self._known[piece] = self._merge(piece)
            found += ids
        return np.asarray(found, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text. U+FFFD stands where the ids hold only a part of a letter's bytes."""
        letters = "".join(self._tokens[int(number)] for number in ids)
        return bytes(self._bytes[letter] for letter in letters).decode("utf-8", errors="replace")

    def fingerprint(self) -> bytes:
        """Return a hash that is different for every vocabulary."""
        said = (sorted(self._ids.items()), sorted(self._ranks.items()))
        return hashlib.sha256(repr(said).encode()).digest()

    def _merge(self, piece: str) -> list[int]:
        parts = [self._letters[byte] for byte in piece.encode("utf-8")]
        while len(parts) > 1:
            ranked = [(self._ranks[pair], pair) for pair in pairwise(parts) if pair in self._ranks]
            if not ranked:
                break
            parts = _join_pair(parts, min(ranked)[1])
        return [self._ids[part] for part in parts]


def _join_pair(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """Return the parts with each occurrence of the pair joined to one part, from the left."""
    joined: list[str] = []
    at = 0
    while at < len(parts):
        if tuple(parts[at : at + 2]) == pair:
            joined.append(parts[at] + parts[at + 1])
            at += 2
        else:
            joined.append(parts[at])
            at += 1
    return joined


def read_bpe(folder: Path, vocabulary: int | None = None) -> Bpe:
    """Read the vocabulary in `folder` (encoder.json, vocab.bpe), or only its first entries."""
    try:
        ids = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
        lines = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{folder} does not hold GPT-2's vocabulary: {error}; put encoder.json and vocab.bpe"
            " there"
        ) from error
    merges = [
        (left, right) for left, _, right in (line.partition(" ") for line in lines[1:] if line)
    ]
    missing = [t for t in (*byte_letters(), *(a + b for a, b in merges)) if t not in ids]
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
        if any(letter not in ids for letter in byte_letters()):
            raise SourceError(
                f"{folder}: the first {BYTES} ids in encoder.json are not the bytes: give GPT-2's"
                " own file"
            )
        merges = [(a, b) for a, b in merges if a + b in ids]
    return Bpe(ids, merges)


def byte_letters() -> tuple[str, ...]:
    """Return a visible letter for each byte, as GPT-2 has them: the byte's own letter if that is
    visible, otherwise one from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(BYTES) if byte not in visible]
    return tuple(
        chr(byte if byte in visible else BYTES + hidden.index(byte)) for byte in range(BYTES)
    )


def piece_pattern() -> re.Pattern[str]:
    """Return the pattern of the pieces into which a text is cut. No merge crosses two pieces.
    Python's `re` does not know the classes of Unicode by name."""
    letters, numbers = _characters_of("L"), _characters_of("N")
    return re.compile(
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{letters}]+| ?[{numbers}]+"
        rf"| ?[^{SPACES}{letters}{numbers}]+|[{SPACES}]+(?![^{SPACES}])|[{SPACES}]+"
    )


def _characters_of(kind: str) -> str:
    """Return the inside of [...] for all characters whose Unicode category begins with `kind`."""
    ranges: list[str] = []
    first: int | None = None
    for code in range(sys.maxunicode + 2):
        inside = code <= sys.maxunicode and unicodedata.category(chr(code))[0] == kind
        if inside and first is None:
            first = code
        elif not inside and first is not None:
            ranges.append(f"{re.escape(chr(first))}-{re.escape(chr(code - 1))}")
            first = None
    return "".join(ranges)
