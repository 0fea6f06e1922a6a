"""A step's graph twice: as a shadow session records it, and as a live session runs it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from support import offload_models as models
from support.offload_models import Batch, Case
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload import TaskGraph
from offload.estimating.shadow_session import ShadowSession
from offload.live import planned_tapes
from offload.live.session import LiveSession


class LstmOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(models.WORDS, 16), nn.Linear(16, models.WORDS)
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(text))[0])


class CheckpointedGpt(models.Gpt):
    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        return self.head(self.norm(x))


class CountingNet(nn.Module):
    """Has a counter, a single number, and a gradient of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("table", torch.ones(8, requires_grad=True))
        self.head.weight = self.enter.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.enter(x)) * self.scale.exp() * self.table)


def transformer(kind: str) -> models.Case:
    """A small model of transformers."""
    import transformers

    small: Any = {"vocab_size": models.WORDS, "hidden_size": 16, "use_cache": False}
    heads: Any = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}

    def mamba() -> nn.Module:
        config = transformers.MambaConfig(**small, num_hidden_layers=1, state_size=4)
        return transformers.MambaForCausalLM(config)

    def moe() -> nn.Module:
        sizes: Any = {"num_local_experts": 4, "num_key_value_heads": 2}
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**small, **heads, **sizes)
        )

    def t5() -> nn.Module:
        config = transformers.T5Config(
            vocab_size=models.WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
        )
        return Decoding(transformers.T5ForConditionalGeneration(config))

    make = {"mamba": mamba, "moe": moe, "t5": t5}[kind]
    return models.Case(make, models.adamw, models.words, models.word_loss)


class Decoding(nn.Module):
    """Gives an encoder and a decoder the same words."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, text: torch.Tensor) -> Any:
        return self.model(input_ids=text, decoder_input_ids=text, use_cache=False)


def gpt(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = models.adamw,
    model: Callable[[], nn.Module] = models.Gpt,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> models.Case:
    return models.Case(model, optimizer, models.words, models.word_loss, around)


def half_on_a_card() -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16)


def adamw(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), 1e-2, **options)


CASES: dict[str, Callable[[], models.Case]] = {
    "gpt, foreach": lambda: gpt(adamw(foreach=True)),
    "gpt, fused": lambda: gpt(adamw(fused=True)),
    "gpt, SGD": lambda: gpt(models.sgd),
    "gpt, autocast": lambda: gpt(around=models.bfloat16),
    "checkpointed": lambda: gpt(model=CheckpointedGpt),
    "vit": lambda: models.cases()["vit"],
    "resnet18": lambda: models.cases()["resnet18"],
    "mamba": lambda: transformer("mamba"),
    "t5": lambda: transformer("t5"),
    "moe": lambda: transformer("moe"),
}


def describe(graph: TaskGraph) -> list[tuple[str, list[int], list[int]]]:
    """Every task with the bytes that it reads and writes."""

    def sizes(buffers: tuple[int, ...]) -> list[int]:
        return [graph.buffers[b].nbytes for b in buffers]

    return [(task.name, sizes(task.reads), sizes(task.writes)) for task in graph.tasks]


@contextmanager
def captured_graphs() -> Iterator[list[TaskGraph]]:
    """Yields a list of the graphs that live sessions make meanwhile, before any pass."""
    graphs: list[TaskGraph] = []
    make = planned_tapes.graph_of

    def note(*given: Any) -> Any:
        made = make(*given)
        graphs.append(made[0])
        return made

    with patch.object(planned_tapes, "graph_of", note):
        yield graphs


def run_steps(
    session: LiveSession, case: Case, convert: Callable[[Batch], Batch], backwards: int = 1
) -> None:
    """Three steps, each of so many backward passes."""
    model, optimizer = session_parts(session)
    for batch in case.batches():
        with session.step():
            for _ in range(backwards):
                given = convert(batch)
                with case.around():
                    loss = case.loss(model(*given[:-1]), given[-1])
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def session_parts(session: LiveSession) -> Any:
    """The module of a session, and its optimizer."""
    weights: Any = session.weights
    return weights._module, weights._optimizers[0]


def shadow_graph(case: Case, device: str, backwards: int = 1, **card: Any) -> TaskGraph:
    """The graph of the last of three steps that are shadows."""
    with ShadowSession(*case.made(), device=device, **card) as session:
        run_steps(session, case, session.without_bytes, backwards)
        return session.take_graphs()[-1]


def live_graph(case: Case, device: str, backwards: int = 1) -> TaskGraph:
    """The graph of the last of three steps that run."""
    model, optimizer = case.made()
    with (
        captured_graphs() as graphs,
        LiveSession(model, optimizer, budget="100%", device=device) as session,
    ):
        session.tapes.passes = ()
        run_steps(session, case, lambda batch: tuple(t.to(device) for t in batch), backwards)
    return graphs[-1]


def shadow_step(session: ShadowSession, model: Any, optimizer: Any, batch: models.Batch) -> None:
    with session.step():
        picture, label = session.without_bytes(batch)
        F.cross_entropy(model(picture), label).backward()
        optimizer.step()
        optimizer.zero_grad()
