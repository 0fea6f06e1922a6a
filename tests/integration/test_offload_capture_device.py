"""A step captured for a GPU: from tensors that lie in host memory, and on a machine without one.

No kernel runs and no byte is read: on a CPU that is shown by stand-ins whose address is in the page
that no process has, in a process of its own.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from offload.errors import CaptureError
from offload.graph.taskgraph import TaskGraph
from offload.program.kernels import Value
from offload.torch_seams import storage_key
from offload.tracing.capture import capture as capture_by_fakes
from offload.tracing.capture import traced, traced_step
from offload.tracing.ranks import Ranks
from offload.tracing.stand_ins import claim, device_of, standing_in
from offload.tracing.training import TrainingStep

GPU = torch.device("cuda", 0)


class Convnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.conv(x)))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(11, 16), nn.Linear(16, 11, bias=False)
        self.out.weight = self.words.weight
        self.qkv = nn.Linear(16, 48)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text)
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, dim=-1))
        x = functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return self.out(functional.dropout(x, 0.1))


def inference(module: nn.Module) -> Callable[[torch.Tensor], Any]:
    def step(x: torch.Tensor) -> Any:
        with torch.no_grad():
            return module(x)

    return step


def ops(graph: TaskGraph) -> list[str]:
    return [
        str(call.op).removeprefix("aten.") for task in graph.tasks for call in task.kernel.calls
    ]


def picture(module: nn.Module) -> list[Any]:
    """All by which one would see that somebody was here. (What a step writes in place counts a
    version at every trace, as it would for a step.)"""
    tensors = [*module.parameters(), *module.buffers()]
    return [
        (id(t), t.data_ptr(), t.untyped_storage()._cdata, t.device, t.requires_grad)
        for t in tensors
    ] + [t._version for t in module.parameters()]


def bits(module: nn.Module) -> list[torch.Tensor]:
    return [t.clone() for t in module.state_dict().values()]


# ---- what is captured ----------------------------------------------------------------------------


def test_a_convnet_on_the_host_is_captured_with_the_kernels_of_a_gpu() -> None:
    net = Convnet()
    before, values = picture(net), bits(net)
    graph = traced(inference(net), torch.randn(2, 3, 8, 8), device=GPU)
    assert graph.program.device == GPU
    assert "cudnn_batch_norm.default" in ops(graph)
    assert "native_batch_norm.default" not in ops(graph)
    assert picture(net) == before
    assert all(map(torch.equal, values, bits(net)))
    assert all(t.device.type == "cpu" for t in graph.program.tensors.values())  # type: ignore[union-attr]


def test_dropout_on_a_gpu_is_one_kernel_and_tied_weights_are_one_buffer() -> None:
    net = Attention()
    before = picture(net)
    state = torch.get_rng_state()
    graph = traced(inference(net), torch.zeros(2, 5, dtype=torch.long), device="cuda")
    assert graph.program.device == GPU
    assert "native_dropout.default" in ops(graph)
    assert [name for name in graph.program.tensors if "weight" in name and "qkv" not in name] == [
        "words.weight"
    ]
    assert picture(net) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_views_over_one_storage_stay_views_of_one() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    halves = (table[:1], table[1:].T)

    def step(x: torch.Tensor) -> torch.Tensor:
        halves[1].mul_(2)
        return x + halves[0] + halves[1].sum()

    graph = traced(step, torch.ones(1, 4), device=GPU)
    assert len(graph.program.tensors) == 1
    [value] = [call.args[0] for task in graph.tasks for call in task.kernel.calls if call.args[0]][
        :1
    ]
    assert (value.size, value.stride, value.offset) == ((4, 2), (1, 4), 4)
    assert [half.untyped_storage()._cdata for half in halves] == [
        table.untyped_storage()._cdata
    ] * 2
    assert torch.equal(table, torch.arange(12.0).reshape(3, 4))


def test_a_tensor_made_in_inference_mode_is_put_back_as_one() -> None:
    with torch.inference_mode():
        table = torch.ones(4)
    graph = traced(lambda x: x * table, torch.ones(4), device=GPU)
    assert ops(graph) == ["mul.Tensor"]
    assert table.is_inference()
    assert table.device.type == "cpu"
    assert table.sum() == 4


def test_recapturing_keeps_the_device() -> None:
    graph = capture_by_fakes(inference(Convnet()), torch.randn(2, 3, 8, 8), device=GPU)
    other = graph.program.recapture(torch.randn(1, 3, 16, 16))
    assert (graph.program.device, other.program.device) == (GPU, GPU)
    assert "cudnn_batch_norm.default" in ops(other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is measured")
def test_without_a_gpu_it_is_planned_by_what_costs_are_assumed_and_says_so() -> None:
    graph = capture_by_fakes(inference(Convnet()), torch.randn(2, 3, 8, 8), device=GPU)
    assert "not measured: there is no cuda:0 here" in offload.plan(graph).explain()


# ---- what the code of a step does on the cpu -----------------------------------------------------


def test_a_number_written_down_is_given_to_the_kernel() -> None:
    graph = traced(lambda x: x * torch.tensor(0.123456789), torch.ones(4), device=GPU)
    [task] = graph.tasks
    number = task.kernel.calls[0].args[1]
    assert torch.equal(number, torch.tensor(0.123456789))
    assert graph.program.tensors == {}


def test_a_number_of_the_users_stays_theirs() -> None:
    scale = torch.tensor(3.0)
    graph = traced(lambda x: x * scale, torch.ones(4), device=GPU)
    number = graph.tasks[0].kernel.calls[0].args[1]
    assert number.data_ptr() == scale.data_ptr()


def test_what_is_made_of_numbers_on_the_cpu_and_then_moved_is_a_constant() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        mask = torch.full((4, 4), -1.0).triu(1)
        mask[0, 0] = 7
        return x + mask.to(x.device, torch.float64) + torch.arange(4).to(x.device)

    graph = traced(step, torch.ones(4, 4), device=GPU)
    mask = torch.full((4, 4), -1.0).triu(1)
    mask[0, 0] = 7
    one, other = graph.program.tensors.values()
    assert torch.equal(one, mask.double())  # type: ignore[arg-type]
    assert torch.equal(other, torch.arange(4))  # type: ignore[arg-type]
    assert ops(graph) == ["add.Tensor", "add.Tensor"]


def test_a_number_that_changes_after_its_use_was_another_one_before() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        number = torch.zeros(())
        y = x + number
        number.add_(1)
        return y + number

    graph = traced(step, torch.ones(4), device=GPU)
    assert [task.kernel.calls[0].args[1].item() for task in graph.tasks] == [0, 1]


def test_a_constant_may_be_returned() -> None:
    graph = traced(lambda x: (x + 1, torch.tensor(5.0)), torch.ones(4), device=GPU)
    value = graph.program.outputs[1]
    assert isinstance(value, Value)
    [constant] = graph.program.tensors.values()
    assert torch.equal(constant, torch.tensor(5.0))  # type: ignore[arg-type]


OWN = torch.ones(())


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda x: x.cpu() + 1, r"_to_copy brings a tensor of the step from cuda:0 to the CPU"),
        (lambda x: x + torch.randn(4).to(x.device), "randn computes on the CPU .* device=x.device"),
        (lambda x: x + (OWN + 1), r"add computes on the CPU in the middle of a step on cuda:0"),
        (lambda x: x + OWN.add_(1), r"add_ computes on the CPU in the middle of a step on cuda:0"),
    ],
    ids=("to the cpu", "random", "the user's number", "in place"),
)  # fmt: skip
def test_other_work_on_the_cpu_is_refused_with_the_line(step: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_offload_capture_device.py:\d+.*{says}"):
        traced(step, torch.ones(4), device=GPU)
    assert OWN == 1


def test_a_cpu_tensor_of_several_numbers_in_between_is_an_error_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"_device.py:\d+.*cuda:0(,| and) cpu.*device=x.device"):
        traced(lambda x: x + torch.arange(4), torch.ones(4), device=GPU)


def test_a_seed_within_a_step_is_seen_there_too() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = functional.dropout(x, 0.5)
        torch.manual_seed(0)
        return functional.dropout(y, 0.5)

    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match="the step sets the state of the random numbers"):
        traced(step, torch.ones(4), device=GPU)
    assert torch.equal(torch.get_rng_state(), state)


# ---- what is put back ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_everything_is_put_back_whatever_happens(error: type[BaseException]) -> None:
    net = Convnet()
    before = picture(net)

    def step(x: torch.Tensor) -> torch.Tensor:
        net(x)
        assert net.conv.weight.device == GPU
        raise error

    with pytest.raises((CaptureError, KeyboardInterrupt)):
        traced(step, torch.randn(2, 3, 8, 8), device=GPU)
    assert picture(net) == before


def test_one_that_takes_no_stand_in_is_an_error_and_the_others_are_put_back() -> None:
    class Sealed(torch.Tensor):
        """Without `.data`."""

        @property
        def data(self) -> torch.Tensor:  # type: ignore[override]
            raise RuntimeError("sealed")

    plain, sealed = torch.ones(3), torch.ones(3).as_subclass(Sealed)
    before = plain.data_ptr()
    with (
        pytest.raises(CaptureError, match=r"a Sealed \(3,\) on cpu cannot be traced for cuda:0"),
        standing_in([plain, sealed], GPU),
    ):
        pass
    assert (plain.data_ptr(), plain.device.type) == (before, "cpu")


def test_who_computes_while_a_tensor_is_away_finds_the_original() -> None:
    weight = torch.ones(4)
    home = weight.data_ptr()
    with standing_in([weight, weight[1:]], GPU) as away:
        assert away[storage_key(weight)].untyped_storage().data_ptr() == home
    assert not away


# ---- where a step runs ---------------------------------------------------------------------------


def test_without_a_device_it_is_the_one_where_everything_lies() -> None:
    here, there = torch.ones(3), claim(GPU, torch.float32, (3,))
    assert device_of(None, [here], [here]) == torch.device("cpu")
    assert device_of(None, [there], [there]) == GPU
    assert device_of(None, [there], [there, torch.tensor(1.0)]) == GPU
    assert device_of("cuda:1", [here], [there]) == torch.device("cuda", 1)
    with pytest.raises(CaptureError, match=r"cpu and cuda:0. Name the device .* device='cuda:0'"):
        device_of(None, [here], [there])
    with pytest.raises(CaptureError, match="device mps"):
        device_of("mps", [], [])


def test_several_processes_are_refused_on_a_gpu() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = TrainingStep(
        lambda x: (net(x).sum(), ()), optimizer, {"": net}, ranks=Ranks(2, list(net.parameters()))
    )
    with pytest.raises(CaptureError, match=r"on cuda:0 cannot be averaged .* Train on one GPU"):
        traced_step(step, torch.ones(1, 2), device=GPU)


# ---- the proof that nothing is touched -----------------------------------------------------------

TWIN = Path(__file__).with_name("offload_capture_twin.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TWIN), *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    "names",
    [
        ("gpt",),
        pytest.param(("resnet18", "vit", "llama", "mobilenet_v2"), marks=pytest.mark.full),
    ],
    ids=("one", "several"),
)
def test_a_trace_of_tensors_that_nobody_can_read_is_the_trace_of_the_real_ones(
    names: tuple[str, ...],
) -> None:
    ended = run(*names)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout == "equal\n" * len(names)


def test_reading_one_of_them_would_have_ended_the_process() -> None:
    assert run("--read").returncode < 0


# ---- what is no device's matter, and was found by it ---------------------------------------------


def test_the_number_in_a_tensor_of_the_users_is_not_baked_in() -> None:
    count = torch.tensor(3)
    with pytest.raises(CaptureError, match="the step asks for the value of a tensor"):
        traced(lambda x: x + 1 if count.item() > 2 else x, torch.ones(3))
