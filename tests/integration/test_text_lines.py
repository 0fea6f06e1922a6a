"""Texts of which every line is a sample, and batches of them that are padded to a few lengths."""

from pathlib import Path

import numpy as np
import pytest
import torch
from integration.test_text import write_vocabulary
from torch.nn import functional

from loaders.errors import SourceError
from perfect.config.schema import OptimizerConfig
from perfect.models import build_language_model
from perfect.models.classification import LanguageTask
from perfect.text.bpe import read_bpe
from perfect.text.padding import IGNORED, PadToLengths
from perfect.text.text_lines import TextLines, read_lines

LINES = ("the thing in the air", "", "singing the thing " * 9, "a", "in the end", "   ")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_vocabulary(tmp_path / "gpt2_bpe")
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").write_text("\n".join(LINES), encoding="utf-8")
    return tmp_path


def test_every_token_of_a_line_but_its_first_is_predicted_once(root: Path) -> None:
    text, bpe = read_lines(root, sequence=8), read_bpe(root / "gpt2_bpe")
    lines = [bpe.encode(line) for line in LINES if line.strip()]
    known = iter([text.train[number] for number in range(len(text.train))])
    for line in lines:
        if len(line) < 2:
            continue
        parts = [next(known) for _ in range(-(-(len(line) - 1) // 8))]
        assert max(len(ids) for ids, _ in parts) <= 8
        assert np.array_equal(torch.cat([ids for ids, _ in parts]), line[:-1])
        assert np.array_equal(torch.cat([following for _, following in parts]), line[1:])
    assert next(known, None) is None
    assert sum(text.train.lengths.values()) == len(text.train)
    assert max(max(part.lengths) for part in (text.train, text.valid, text.test)) == 8


def test_the_ids_are_kept_beside_the_text(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first = read_lines(root, 8)
    assert capfd.readouterr() == ("", ""), "nothing but a terminal shows a bar"
    assert len([*root.glob("*.npy")]) == 3
    for part in root.glob("*.npy"):
        part.unlink()
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    first = read_lines(root, 8)
    assert "encoding train.txt" in capfd.readouterr().err
    monkeypatch.setattr("perfect.text.bpe.Bpe.encode", None)
    again = read_lines(root, 8)
    assert all(
        torch.equal(a, b)
        for number in range(len(first.train))
        for a, b in zip(first.train[number], again.train[number], strict=True)
    )


def samples(*lengths: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids = np.arange(1, sum(lengths) + len(lengths) + 1, dtype=np.int32) % 50
    ends = np.cumsum([length + 1 for length in lengths])
    lines = TextLines(ids, ends, 64)
    return [lines[number] for number in range(len(lines))]


def test_a_batch_is_padded_to_the_next_length() -> None:
    ids, targets = PadToLengths((4, 8, 16))(samples(3, 5))
    assert ids.shape == targets.shape == (2, 8)
    assert (targets[0] != IGNORED).sum() == 3 and (targets[1] != IGNORED).sum() == 5
    assert ids[0, 3:].eq(0).all() and targets[0, 3:].eq(IGNORED).all()
    assert PadToLengths((4, 8))(samples(4, 4))[0].shape == (2, 4)
    with pytest.raises(SourceError, match="17 tokens, and batches are padded to 4, 16"):
        PadToLengths((4, 16))(samples(17))


@pytest.mark.parametrize("name", ["gpt2_tiny", "llama_tiny"])
def test_padding_changes_no_loss_and_no_gradient_but_for_rounding(name: str) -> None:
    torch.manual_seed(0)
    model = build_language_model(name, 50, 0.0 if name.startswith("gpt2") else None).double()
    task = LanguageTask(model, OptimizerConfig())
    given = samples(3, 9, 5)
    loss = task._loss(PadToLengths((16,))(given))
    padded = torch.autograd.grad(loss, [*model.parameters()])
    alone = [
        functional.cross_entropy(model(ids[None])[0], following, reduction="sum")
        for ids, following in given
    ]
    whole = torch.stack(alone).sum() / 17
    gradients = torch.autograd.grad(whole, [*model.parameters()])
    assert torch.allclose(loss, whole, rtol=1e-12)
    for one, other in zip(padded, gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-12)
