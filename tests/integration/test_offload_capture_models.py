"""Whole training steps: the captured graph, run task by task, leaves eager's bits."""

from typing import Any

import pytest
import torch
from support import offload_models as models
from support.offload_reference import Reference as reference

from offload.tracing.capture import traced_training_step as capture_training_step

NAMES = (
    "resnet18",
    "resnet18 in evaluation mode",
    "resnet18 channels last",
    "resnet18 channels last, small",
    "mobilenet_v2",
    "vit",
    "gpt",
    "gpt around autocast",
    "llama",
    "llama in one precision",
)


def check(case: Any, rates: tuple[float, ...] = ()) -> Any:
    """Three steps of both, then bit for bit."""
    model, optimizer, other, plain = models.twin(case)
    batches = case.batches()
    before = models.state_of(model, optimizer)
    with case.around():
        graph = capture_training_step(model, case.loss, optimizer, *batches[0])
    after = models.state_of(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    run = reference(graph)
    for number, batch in enumerate(batches):
        for chosen in (optimizer, plain) if rates else ():
            for group in chosen.param_groups:
                group["lr"] = rates[number]
        torch.manual_seed(number)
        loss, *_ = run(*batch)
        torch.manual_seed(number)
        expected = models.eager_step(case, other, plain, batch)
        assert torch.equal(loss, expected), number
    found, wanted = models.state_of(model, optimizer), models.state_of(other, plain)
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not different
    return graph


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_training_step_leaves_the_bits_of_eager(name: str) -> None:
    check(models.cases()[name])


def test_a_huggingface_model_leaves_the_bits_of_eager() -> None:
    pytest.importorskip("transformers")
    check(models.huggingface())


def optimizers() -> dict[str, Any]:
    adam, adamw, sgd = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
    return {
        "adam": lambda p: adam(p, 1e-2, weight_decay=0.1),
        "adam foreach": lambda p: adam(p, 1e-2, foreach=True),
        "adam fused": lambda p: adam(p, 1e-2, fused=True),
        "adam one by one": lambda p: adam(p, 1e-2, foreach=False),
        "adam amsgrad": lambda p: adam(p, 1e-2, amsgrad=True, maximize=True),
        "adamw": lambda p: adamw(p, 1e-2),
        "adamw foreach": lambda p: adamw(p, 1e-2, foreach=True),
        "adamw fused": lambda p: adamw(p, 1e-2, fused=True),
        "adamw fused amsgrad": lambda p: adamw(p, 1e-2, fused=True, amsgrad=True),
        "adamw tensor lr": lambda p: adamw(p, torch.tensor(1e-2)),
        "sgd": lambda p: sgd(p, 0.1),
        "sgd momentum": lambda p: sgd(p, 0.1, momentum=0.9),
        "sgd nesterov": lambda p: sgd(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        "sgd foreach": lambda p: sgd(p, 0.1, momentum=0.9, foreach=True),
        "sgd fused": lambda p: sgd(p, 0.1, momentum=0.9, fused=True, maximize=True),
    }


@pytest.mark.parametrize("name", sorted(optimizers()))
def test_the_update_is_that_of_the_users_own_optimizer(name: str) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return optimizers()[name](model.parameters())

    rates = (0.1, 0.03, 0.005) if "tensor" not in name else ()
    check(models.Case(models.Gpt, make, models.words, models.word_loss), rates)
