"""GPT-2's tokens against known encodings, and blocks that tile a text."""

import json
import logging
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from loaders.errors import SourceError
from perfect.text.bpe import read_bpe
from perfect.text.text_lines import blocks, read_wikitext

MERGES = (("t", "h"), ("th", "e"), ("\u0120", "the"), ("i", "n"), ("in", "g"), ("\u0120", "a"))
SHARED = Path(__file__).parents[3] / "shared" / "data"


def write_vocabulary(folder: Path, merges: tuple[tuple[str, str], ...] = MERGES) -> Path:
    """Bytes as GPT-2 numbers them, the merges, and its end of text."""
    folder.mkdir(parents=True, exist_ok=True)
    visible = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
    hidden = [chr(256 + n) for n in range(256 - len(visible))]
    tokens = [*visible, *hidden, *(a + b for a, b in merges), "<|endoftext|>"]
    ids = {token: number for number, token in enumerate(tokens)}
    (folder / "encoder.json").write_text(json.dumps(ids), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges)]
    (folder / "vocab.bpe").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_texts(root: Path, lines: int = 40) -> Path:
    write_vocabulary(root / "gpt2_bpe")
    (root / "wikitext-2").mkdir()
    for part in ("train", "valid", "test"):
        text = " = A title = \n the thing in the air , singing . \n" * lines
        (root / "wikitext-2" / f"wiki.{part}.tokens").write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real vocabulary and texts, where this checkout has them."""
    if not (SHARED / "gpt2_bpe.tar.xz").exists():
        pytest.skip("no GPT-2 vocabulary beside this checkout")
    root = tmp_path_factory.mktemp("text")
    for name in ("gpt2_bpe", "wikitext-2"):
        with tarfile.open(SHARED / f"{name}.tar.xz") as archive:
            archive.extractall(root, filter="data")
    return root


ODD = (
    "It's 42 o'clock; we'll see\u2026",
    "  two  spaces\n\n\nand lines \t\t tabs   ",
    "na\u00efve \u4f60\u597d \U0001f600\U0001f680 \u0645\u0631\u062d\u0628\u0627 \u2460\u00bd",
    "\x00\x1c\x1f\x7f\u00ad\u00a0\u2003\u3000\ufeff",
)


def test_text_is_refused_without_the_tokenizers_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfect.text.bpe.tokenizers", None)
    with pytest.raises(SourceError, match=r"needs tokenizers: pip install '\.\[llm\]'"):
        read_bpe(write_vocabulary(tmp_path / "bpe"))


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"does not hold GPT-2's vocabulary"):
        read_bpe(tmp_path)


def test_known_encodings_of_gpt2(gpt2: Path) -> None:
    bpe = read_bpe(gpt2 / "gpt2_bpe")
    assert bpe.vocabulary == 50257
    assert bpe.encode("Hello world").tolist() == [15496, 995]
    assert bpe.encode("Hello, world!").tolist() == [15496, 11, 995, 0]


def test_ids_are_those_of_the_tokenizer_in_transformers(gpt2: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = gpt2 / "gpt2_bpe"
    theirs = transformers.GPT2Tokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    ours = read_bpe(folder)
    raw = (gpt2 / "wikitext-2" / "wiki.test.raw").read_text(encoding="utf-8")
    for text in (*ODD, raw[:200_000]):
        assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]


# ---- blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "sequence"), [(10, 4), (9, 4), (12, 4), (2, 1)])
def test_every_token_but_the_first_is_predicted_once(tokens: int, sequence: int) -> None:
    ids = np.arange(100, 100 + tokens, dtype=np.int32)
    inputs, targets = blocks(ids, sequence, Path("text")).tensors
    whole = (tokens - 1) // sequence * sequence
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (whole // sequence, sequence)
    assert inputs.flatten().tolist() == ids[:whole].tolist()
    assert targets.flatten().tolist() == ids[1 : whole + 1].tolist()


def test_a_damaged_file_of_tokens_is_made_anew(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = write_texts(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    first = read_wikitext(root, 8)
    for file in (root / "wikitext-2").glob("*.npy"):
        file.write_bytes(file.read_bytes()[:90])
    assert torch.equal(read_wikitext(root, 8).train.tensors[1], first.train.tensors[1])
    assert capfd.readouterr().err.count("encoding wiki.train.tokens") >= 2
    with caplog.at_level(logging.ERROR, "perfect"):  # as perfect-train -q
        read_wikitext(root, 8, vocabulary=258)
    assert capfd.readouterr().err == ""


def test_a_text_that_changed_is_encoded_anew(tmp_path: Path) -> None:
    root = write_texts(tmp_path)
    first = len(read_wikitext(root, 8).train)
    with (root / "wikitext-2" / "wiki.train.tokens").open("a") as file:
        file.write(" more of the same" * 40)
    assert len(read_wikitext(root, 8).train) > first


def test_all_texts_that_are_not_there_are_named(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "gpt2_bpe")
    with pytest.raises(SourceError, match=r"wiki\.train\.tokens, .*wiki\.test\.raw; unpack"):
        read_wikitext(tmp_path, 8, test_text="raw")
