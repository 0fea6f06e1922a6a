"""Reads texts of which every line is a sample of its own length: sentences, answers, documents.

    ROOT/train.txt  valid.txt  test.txt      one text a line; empty lines are left out
    ROOT/gpt2_bpe/                           GPT-2's vocabulary

    line     t0 t1 t2 t3 t4 t5 t6            sequence = 4
    inputs   t0 t1 t2 t3 | t4 t5             a longer line is cut into samples of up to `sequence`;
    targets  t1 t2 t3 t4 | t5 t6             every token but the line's first is predicted once

A line of fewer than two tokens has nothing to predict and is left out.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, TensorDataset

from loaders.errors import SourceError
from perfect.text.bpe import Bpe, cached_ids, read_bpe, read_text, with_progress_bar

log = logging.getLogger(__name__)


class TextLines(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of (inputs, targets), of `1` to `sequence` tokens each, in memory."""

    def __init__(self, ids: NDArray[np.int32], ends: NDArray[np.int64], sequence: int) -> None:
        """`ids`: all lines, one after the other; `ends`: where each of them ends."""
        self._ids = torch.from_numpy(ids.astype(np.int64))
        begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        self._pieces = [
            (at, min(at + sequence, int(end) - 1))
            for begin, end in zip(begins, ends, strict=True)
            for at in range(int(begin), int(end) - 1, sequence)
        ]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin, end = self._pieces[number]
        return self._ids[begin:end], self._ids[begin + 1 : end + 1]

    @property
    def lengths(self) -> Counter[int]:
        """How many samples have so many tokens."""
        return Counter(end - begin for begin, end in self._pieces)


Part = TypeVar("Part", TextLines, TensorDataset)


@dataclass(frozen=True, slots=True)
class ReadText(Generic[Part]):
    """The three parts of a text. Blocks of one length are (inputs, targets): int64 [blocks,
    sequence], in memory."""

    train: Part
    valid: Part
    test: Part
    vocabulary: int


def read_lines(root: Path, sequence: int, vocabulary: int | None = None) -> ReadText[TextLines]:
    bpe = read_bpe(root / "gpt2_bpe", vocabulary)
    files = [root / f"{name}.txt" for name in ("train", "valid", "test")]
    _check_there(files, "put texts there, one text a line")
    train, valid, test = (_lines(file, bpe, sequence) for file in files)
    return ReadText(train, valid, test, bpe.vocabulary)


def _check_there(files: Sequence[Path], remedy: str) -> None:
    if missing := [str(file) for file in files if not file.is_file()]:
        raise SourceError(f"these files are missing: {', '.join(missing)}; {remedy}")


def _lines(file: Path, bpe: Bpe, sequence: int) -> TextLines:
    text = read_text(file)
    packed = cached_ids(file, text, bpe, lambda text: _pack(file, text, bpe), "lines")
    count = int(packed[0])
    sizes, ids = packed[1 : count + 1].astype(np.int64), packed[count + 1 :]
    if short := int((sizes < 2).sum()):
        log.info("%s: %d lines of fewer than two tokens are left out", file, short)
    lines = TextLines(ids, np.cumsum(sizes), sequence)
    if not len(lines):
        raise SourceError(f"{file} has no line of two tokens or more: give texts, one a line")
    return lines


def _pack(file: Path, text: str, bpe: Bpe) -> NDArray[np.int32]:
    """Return the number of lines, the tokens of each, and all tokens."""
    texts = [line for line in text.splitlines() if line.strip()]
    lines = [bpe.encode(line) for line in with_progress_bar(texts, f"encoding {file.name}")]
    sizes = [len(lines), *map(len, lines)]
    return np.concatenate([np.asarray(sizes, dtype=np.int32), *lines]).astype(np.int32)


TestText = Literal["tokens", "raw"]


def read_wikitext(
    root: Path, sequence: int, vocabulary: int | None = None, test_text: TestText = "tokens"
) -> ReadText[TensorDataset]:
    bpe = read_bpe(root / "gpt2_bpe", vocabulary)
    names = ("wiki.train.tokens", "wiki.valid.tokens", f"wiki.test.{test_text}")
    files = [root / "wikitext-2" / name for name in names]
    _check_there(files, "unpack WikiText-2 there")
    train, valid, test = (blocks(_tokens(file, bpe), sequence, file) for file in files)
    return ReadText(train, valid, test, bpe.vocabulary)


def blocks(tokens: NDArray[np.int32], sequence: int, source: Path) -> TensorDataset:
    """Return inputs and targets. Both are views of the same tokens, so no token is stored twice."""
    count = (len(tokens) - 1) // sequence
    if count < 1:
        raise SourceError(
            f"{source} has {len(tokens)} tokens, too few for one block of {sequence} and the token"
            " after it: lower sequence"
        )
    ids = torch.from_numpy(tokens.astype(np.int64))
    inputs, targets = (
        ids[shift : shift + count * sequence].view(count, sequence) for shift in (0, 1)
    )
    return TensorDataset(inputs, targets)


def _tokens(file: Path, bpe: Bpe) -> NDArray[np.int32]:
    text = read_text(file)
    text = as_lines_apart(text) if file.suffix == ".raw" else text
    return cached_ids(file, text, bpe, lambda text: bpe.encode(text, f"encoding {file.name}"))


def as_lines_apart(text: str) -> str:
    """Return the raw test text as papers on GPT-2 read it: with an empty line between its lines."""
    lines = text.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    return "\n\n".join("" if not line.strip() else f"{line}\n" for line in lines)
