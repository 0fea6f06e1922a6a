"""The example that serves a net over HTTP while another one is trained."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch

from benchmarks.jobs.fleet_jobs import QUIET

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_while_training.py"
BAD = (
    (b"hello", "Expecting value"),
    (b"[1, 2]", 'send {"picture"'),
    (b'{"picture": [[1, 2], [3, 4]]}', r"the shape (2, 2), not (3, 32, 32)"),
    (b'{"picture": [[1, 2], [3]]}', "expected sequence of length"),
    (b'{"picture": "cat"}', "str"),
    (b'{"picture": [1' + b"0" * 400 + b"]}", "too large"),
)
"""What is sent, and words of the answer."""


@pytest.fixture
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("serve_while_training", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def undisturbed(example: ModuleType, steps: int, width: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    module = example.Classifier(width)
    trainer = L.Trainer(
        max_epochs=-1, max_steps=steps, accelerator="cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, example.batches())
    return module.state_dict()


def test_clients_get_the_nets_answers_and_the_training_ends_as_if_nobody_had_asked(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[Any] = []
    bad: list[tuple[int, str]] = []
    run, ask = example.run, example.Clients._one

    def kept(*args: Any) -> Any:
        outcomes.append(run(*args))
        return outcomes[0]

    async def asks_badly_first(self: Any, session: Any, due: float) -> None:
        for body, _ in BAD[len(bad) :]:  # all of them before the first good one
            async with session.post(self._url, data=body) as response:
                bad.append((response.status, (await response.json())["error"]))
        await ask(self, session, due)

    monkeypatch.setattr(example, "run", kept)
    monkeypatch.setattr(example.Clients, "_one", asks_badly_first)
    options = ["--seconds=4", "--rate=20", "--width=4", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["serve_while_training.py", *options])
    example.main()

    numbers = json.loads((tmp_path / "serving.json").read_text())
    assert (tmp_path / "serving.png").stat().st_size > 10_000
    assert numbers["requests"] > 0
    assert numbers["failed"] == numbers["answers that are not the net's alone"] == 0
    assert numbers["latency p50 ms"] <= numbers["latency p95 ms"]
    assert numbers["steps a second, nobody asks"] > 0
    assert numbers["steps a second, clients ask"] > 0
    assert {status for status, _ in bad} == {400}
    said = [words for _, words in bad]
    assert all(any(words in one for one in said) for _, words in BAD)
    alone = undisturbed(example, numbers["steps"], width=4)
    beside = outcomes[0].module.state_dict()
    assert [key for key, value in alone.items() if not torch.equal(value, beside[key])] == []


def test_a_rate_of_nothing_is_refused(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve_while_training.py", "--rate=0"])
    with pytest.raises(SystemExit):
        example.main()
    assert "--seconds and --rate must be more than 0" in capsys.readouterr().err
