"""Part b: is a planned step eager's, bit for bit, whatever runs it and within whatever budget.

    eager        s0 -> s1 -> s2 -> s3      the same weights, batches and seeds
    eager again  s0 -> s1 -> s2 -> s3      the control: what eager itself does not repeat
    ours         s0 -> s1 -> s2 -> s3      losses, parameters, buffers, optimizer state: counted

Where torch's own kernels add up in an order of chance, the control says so, and the same is asked
once more with deterministic kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.gpu.models import TINY, Batch, Case, Kind, language
from benchmarks.gpu.ours import BUDGETS, ENGINES, MIB, attempt, eager, replayed, stepping
from benchmarks.gpu.part import Found, Job, Row, Rows, Step
from benchmarks.gpu.pictures import odd_net, resnet18, vit
from benchmarks.gpu.timing import free
from benchmarks.harness.report import Report, Target, format_table
from benchmarks.offloading.nets import Size

NAME = "equality"
CLAIM = "Claim: engines cuda and cudagraph give eager's bits, within any budget"
STEPS = 4
CASES = ("resnet18", "vit-b-16", "gpt2 with dropout", "llama bf16", "odd convnet")
MODES = ("as it is", "deterministic")
GPT2 = Size(50257, 768, 12, 12, 3072, 4, 512)
LLAMA = Size(32000, 1024, 6, 16, 2752, 2, 1024)
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Read by cuBLAS when it begins, and asked for by torch's deterministic mode."""
SMOKE = {
    "as it is": (
        "resnet18; as it is; control", "resnet18; as it is; cuda, none",
        "gpt2 with dropout; as it is; control", "gpt2 with dropout; as it is; cuda, 60 %",
        "llama bf16; as it is; control", "llama bf16; as it is; cudagraph, minimum",
        "odd convnet; as it is; control", "odd convnet; as it is; cudagraph, none",
    ),
    "deterministic": (
        "vit-b-16; deterministic; control", "vit-b-16; deterministic; cuda, minimum",
    ),
}  # fmt: skip

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class End:
    """Where some steps led to."""

    losses: list[torch.Tensor]
    state: State


def case_of(name: str, smoke: bool) -> Case:
    if name == "resnet18":
        return resnet18(smoke)
    if name == "vit-b-16":
        return vit("b-16", smoke, 16)
    if name == "odd convnet":
        return odd_net(smoke)
    gpt2, llama = (TINY, TINY) if smoke else (GPT2, LLAMA)
    if name == "gpt2 with dropout":
        return language(Kind(gpt2, "gpt2", dropout=0.1, dtype=torch.float32))
    return language(Kind(llama, dtype=torch.bfloat16))


def steps(smoke: bool) -> Sequence[Step]:
    if smoke:
        return [_step(cells, mode) for mode, cells in SMOKE.items()]
    return [_step(_cells(name, mode), mode) for mode in MODES for name in CASES]


def _step(cells: Sequence[str], mode: str) -> Step:
    environment = DETERMINISTIC if mode == "deterministic" else {}
    return Step("gpu.equality:compare", tuple(cells), {"mode": mode}, 2.0, environment)


def _cells(name: str, mode: str) -> list[str]:
    ways = [f"{engine}, {share}" for share in BUDGETS for engine in ENGINES]
    return [f"{name}; {mode}; {way}" for way in ("control", *ways)]


def compare(job: Job) -> Rows:
    if job.arguments["mode"] == "deterministic":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Their backward passes sum in an order of chance, and there is no other way in them.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    reference: dict[str, End] = {}
    for cell in job.cells:
        name, _, way = cell.split("; ")
        case = case_of(name, job.smoke)
        if name not in reference:
            # What libraries find out when they are first called is known by then.
            _walk(_trained(case, job.device)[0], case, job.device)
            reference = {name: _eager(case, job.device)}  # of one case at a time
        yield cell, attempt(partial(_against, reference[name], case, way, job.device))
        free(job.device)


def _against(reference: End, case: Case, way: str, device: str) -> Row:
    if way == "control":
        return difference(reference, _eager(case, device)) | {"setting": case.setting}
    engine, budget = way.split(", ")
    end, row = _ours(case, engine, budget, device)
    return difference(reference, end) | row


def _eager(case: Case, device: str) -> End:
    step, state = _trained(case, device)
    losses = _walk(step, case, device)
    return End(losses, state())


def _trained(case: Case, device: str) -> tuple[Callable[..., torch.Tensor], Callable[[], State]]:
    """Its step as anybody writes it, and what the steps have led to."""
    module = case.build(device)
    optimizer = case.optimizer(module)
    return eager(case, module, optimizer), partial(state_of, module, optimizer)


def _ours(case: Case, engine: str, budget: str, device: str) -> tuple[End, Row]:
    module = case.build(device)
    optimizer = case.optimizer(module)
    with stepping(case, module, optimizer, case.batch(device), device, engine, budget) as steps:
        losses = _walk(steps, case, device)
        plans, again = steps.plans, replayed(steps.runner)
    row = {
        "replayed": again,
        "notes": [*dict.fromkeys(one for made in plans for one in made.remarks)],
        "device_mib": max(made.device_bytes for made in plans) / MIB,
        "peak_mib": max(made.peak_bytes for made in plans) / MIB,
    }  # fmt: skip
    return End(losses, state_of(module, optimizer)), row


def _walk(step: Callable[..., torch.Tensor], case: Case, device: str) -> list[torch.Tensor]:
    losses = []
    for number in range(STEPS):
        torch.manual_seed(1000 + number)
        batch: Batch = case.batch(device)
        torch.manual_seed(number)
        losses.append(step(*batch).cpu())
    return losses


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Copies, on the host."""
    found: State = dict([*module.named_parameters(), *module.named_buffers()])
    for number, state in enumerate(optimizer.state.values()):
        found |= {f"state {number} {key}": v for key, v in state.items() if torch.is_tensor(v)}
    return {name: t.detach().cpu().clone() for name, t in found.items()}


def difference(a: End, b: End) -> Row:
    """Tensors that differ in any bit, and by how much at the most."""
    missing = set(a.state) ^ set(b.state)
    wrong = [
        name for name in a.state if name in b.state and not _same(a.state[name], b.state[name])
    ]
    most = [(a.state[n].double() - b.state[n].double()).abs().max().item() for n in wrong]
    return {
        "losses": sum(not _same(x, y) for x, y in zip(a.losses, b.losses, strict=True)),
        "tensors": len(wrong) + len(missing),
        "of": len(a.state),
        "most": max(most, default=0.0),
        "first": min([*wrong, *missing], default=""),
    }


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Every bit: a NaN is itself, and the zeros differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def report(found: Found) -> Report:
    said = Report(NAME, CLAIM, {"steps": STEPS})
    lines = []
    for cell, row in found.rows.items():
        key, _, way = cell.rpartition("; ")
        lines.append([
            key, way, f"{row['losses']} of {STEPS}", f"{row['tensors']} of {row['of']}",
            f"{row['most']:.3g}", row["first"],
            f"{row['device_mib']:.1f} of {row['peak_mib']:.1f}" if "device_mib" in row else "",
        ])  # fmt: skip
    head = ["model; kernels", "way", "losses that differ", "tensors that differ",
            "most", "the first", "device MiB of the peak"]  # fmt: skip
    said.tables["Against eager"] = format_table(head, lines)
    ways = [cell for cell in found.cells if not cell.endswith("control")]
    said.asked = [
        Target(f"{cell}: tensors that differ", 0, found.number(cell, "tensors"))
        for cell in ways
        if not _varies(cell, found)
    ]
    looped = [c for c in ways if found.rows.get(c, {}).get("replayed") is False]
    said.asked.append(Target("cells of cudagraph in which the loop ran", 0, len(looped)))
    notes = {cell: "; ".join(row["notes"]) for cell, row in found.rows.items() if row.get("notes")}
    if notes:
        said.tables["What the plans and engines said"] = format_table(
            ["cell", "note"], [[*one] for one in notes.items()]
        )
    settings = {cell: row["setting"] for cell, row in found.rows.items() if "setting" in row}
    said.tables["Models"] = format_table(
        ["model; kernels", "setting"], [list(s) for s in settings.items()]
    )
    said.remarks = [
        "control: eager once more. Where it differs from itself, nothing is asked: sums in an order"
        " of chance say nothing of ours.",
        "tensors: parameters, buffers, optimizer state. most: the largest difference of a number.",
    ]
    return said


def _varies(cell: str, found: Found) -> bool:
    """Whether eager itself does not come to the same bits twice."""
    return bool(found.number(f"{cell.rpartition('; ')[0]}; control", "tensors"))
