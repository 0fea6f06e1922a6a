"""Reads WikiText-2 (Merity et al. 2016) as blocks of `sequence` tokens.

    ROOT/wikitext-2/wiki.train.tokens   the three parts, one article after the other; <unk> stands
                    wiki.valid.tokens   for rare words
                    wiki.test.tokens    (or wiki.test.raw: the test text as it was written)
    ROOT/gpt2_bpe/                      GPT-2's vocabulary

    tokens   t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9      sequence = 4
    inputs   t0 t1 t2 t3 | t4 t5 t6 t7              every token but t0 is predicted once;
    targets  t1 t2 t3 t4 | t5 t6 t7 t8              tokens that fill no block (t9) are left out

The ids are cached beside the text (cached_ids.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from loaders.errors import SourceError
from perfect.text.bpe import Bpe, read_bpe
from perfect.text.cached_ids import cached_ids, read_text

TestText = Literal["tokens", "raw"]


@dataclass(frozen=True, slots=True)
class WikiText:
    """The three parts. Each holds (inputs, targets): int64 [blocks, sequence], in memory."""

    train: TensorDataset
    valid: TensorDataset
    test: TensorDataset
    vocabulary: int


def read_wikitext(
    root: Path, sequence: int, vocabulary: int | None = None, test_text: TestText = "tokens"
) -> WikiText:
    bpe = read_bpe(root / "gpt2_bpe", vocabulary)
    names = ("wiki.train.tokens", "wiki.valid.tokens", f"wiki.test.{test_text}")
    files = [root / "wikitext-2" / name for name in names]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise SourceError(f"these files are missing: {', '.join(missing)}; unpack WikiText-2 there")
    train, valid, test = (blocks(_tokens(file, bpe), sequence, file) for file in files)
    return WikiText(train, valid, test, bpe.vocabulary)


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
