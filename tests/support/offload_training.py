"""Five steps of a model, in eager PyTorch and in live steps, from the same start, to be compared.

    start --eager, once--> losses, end          start --plans, again and again--> losses, end

Nothing here knows how a plan works: the oracle is the model, its loss and its optimizer, called as
everybody calls them.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
from support import offload_models as models
from support.live_training import Beside, LiveTraining, training_graph

import offload
from offload import BudgetTooSmall, Plan, TaskGraph

STEPS = 5
RATES = (0.02, 0.01, 0.003, 0.03, 0.001)
"""The learning rate of each step, of all groups."""


@dataclass(slots=True)
class Training:
    """A model that is captured, its start, and where eager steps lead."""

    case: Any
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    graph: TaskGraph
    batches: Sequence[tuple[torch.Tensor, ...]]
    start: dict[str, torch.Tensor]
    losses: list[torch.Tensor]
    end: dict[str, torch.Tensor]

    def restart(self) -> None:
        """In place, as a user would load a checkpoint; no runner has the tensors now."""
        self.optimizer.zero_grad()  # a step that was interrupted has left some
        with torch.no_grad():
            for name, tensor in named(self.model, self.optimizer).items():
                tensor.copy_(self.start[name])

    def run(
        self,
        made: Plan,
        engine: str,
        seed: int,
        order: str = "random",
        driver: Any = None,
        beside: Beside = nullcontext,
    ) -> None:
        """Five steps; every difference from eager is an error that names it. `beside`: what goes on
        while the runner runs."""
        self.restart()
        how: Any = {"engine": engine, "order": order, "seed": seed, "driver": driver}
        with self.stepping(made, beside, poison=True, **how) as step_of:
            for step, batch in enumerate(self.batches):
                rated(self.optimizer, step)
                torch.manual_seed(step)
                loss, *_ = step_of(*batch)
                assert torch.equal(loss, self.losses[step]), f"the loss of step {step}"
            self.compare()
        self.compare()  # out of the arenas again

    def stepping(self, made: Plan, beside: Beside = nullcontext, **how: Any) -> LiveTraining:
        return LiveTraining(
            self.model,
            self.case.loss,
            self.optimizer,
            made,
            around=self.case.around,
            beside=beside,
            **how,
        )

    def compare(self) -> None:
        found = named(self.model, self.optimizer)
        assert found.keys() == self.end.keys()
        wrong = [name for name, tensor in found.items() if not torch.equal(tensor, self.end[name])]
        assert not wrong, wrong

    def planned(self, share: float, placement: str) -> Plan:
        """At a share of the peak, or at the smallest budget where that is more."""
        made = planned(self.graph, share, placement)
        made.verify()
        return made


@functools.cache
def trained_once(name: str, device: str = "cpu") -> Training:
    """A case of offload_models that was captured, and trained by eager PyTorch, once a process."""
    return trained(models.cases()[name], device)


def trained(case: Any, device: str = "cpu") -> Training:
    model, optimizer = case.made()
    model.to(device)
    batches = [tuple(t.to(device) for t in batch) for batch in case.batches(STEPS)]
    models.eager_step(case, model, optimizer, batches[0])  # now it has its states
    optimizer.zero_grad()
    other, plain = copy.deepcopy((model, optimizer))
    graph = training_graph(model, case.loss, optimizer, *batches[0], around=case.around)
    start = {name: tensor.clone() for name, tensor in named(model, optimizer).items()}
    losses = []
    for step, batch in enumerate(batches):
        rated(plain, step)
        torch.manual_seed(step)
        losses.append(models.eager_step(case, other, plain, batch))
    end = named(other, plain)
    return Training(case, model, optimizer, graph, batches, start, losses, end)


def planned(graph: TaskGraph, share: float, placement: str) -> Plan:
    peak = offload.plan(graph, placement=placement).peak_bytes
    try:
        return offload.plan(graph, int(peak * share) or 1, placement=placement)
    except BudgetTooSmall as refused:  # how much a convolution's scratch takes, the CPU decides
        # the update's numbers vary from the second step on, which groups its calls otherwise
        return offload.plan(graph, max(int(1.25 * refused.needed), 1 << 16), placement=placement)


def rated(optimizer: torch.optim.Optimizer, step: int) -> None:
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = RATES[step] * (1 + number)


def named(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All that a step changes: parameters, buffers, and the optimizer's `state_dict()`."""
    found = dict(model.state_dict())
    found.update({f"hidden {name}": b for name, b in model.named_buffers() if name not in found})
    for number, state in optimizer.state_dict()["state"].items():
        for key, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                found[f"{key} of {number}"] = tensor
    return found


def large() -> dict[str, Any]:
    """Of the size that people use: updates are cut into pieces, workspaces have places."""

    def pictures() -> tuple[torch.Tensor, ...]:
        return torch.randn(1, 3, 224, 224), torch.randint(0, 10, (1,))

    def text(vocabulary: int, length: int) -> Callable[[], tuple[torch.Tensor, ...]]:
        def batch() -> tuple[torch.Tensor, ...]:
            words = torch.randint(0, vocabulary, (2, length + 1))
            return words[:, :-1].contiguous(), words[:, 1:].contiguous()

        return batch

    def gpt2(layers: int) -> Callable[[], torch.nn.Module]:
        import transformers

        sizes = transformers.GPT2Config(n_layer=layers, use_cache=False)
        return lambda: transformers.GPT2LMHeadModel(sizes)

    def llama() -> torch.nn.Module:
        import transformers

        sizes = transformers.LlamaConfig(
            vocab_size=8000, hidden_size=512, intermediate_size=1376, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        # With sdpa it makes a mask when it is traced and none in eager: other kernels, other bits.
        sizes._attn_implementation = "eager"
        return transformers.LlamaForCausalLM(sizes)

    def vit() -> torch.nn.Module:
        return torchvision.models.vit_b_16(num_classes=10)

    adamw, loss = models.adamw, models.word_loss
    return {
        "vit_b_16": models.Case(vit, adamw, pictures),
        "gpt2 of 4 layers": models.Case(gpt2(4), adamw, text(50257, 64), loss),
        "gpt2_small": models.Case(gpt2(12), adamw, text(50257, 64), loss),
        "llama": models.Case(llama, adamw, text(8000, 64), loss, models.bfloat16),
    }
