"""`perfect-step save RUN --step N`, `replay FILE`, `bisect FILE`: a training step as a file.

    save     trains RUN again from its newest checkpoint before step N, and writes the step
    replay   runs the step eagerly and by a plan in this process, and compares all bits
    bisect   names the pass, the task and the value that first differ from eager

Attach the file to a report of a fault. It holds numbers and the names of operations, so that
reading one runs no code of its author. Exit codes: 0 no bit differs, 1 a bit differs, 2 a run or a
file cannot be used.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perfect.command_line import importing, new_parser, print_plain, run_command, silence_lightning

if TYPE_CHECKING:
    from offload.plans.plan import Budget
    from offload.replaying.step_file import SavedStep

ENGINES = ("auto", "serial", "threads", "cuda", "cudagraph")


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(
        "perfect-step", "Save a training step, replay it, and find its first fault."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    save = commands.add_parser("save", help="train a run again, and save one step")
    save.add_argument("run", type=Path, metavar="RUN", help="a folder of perfect-train")
    save.add_argument(
        "--step", type=int, required=True, help="the number of the step; the first is 1"
    )
    save.add_argument("--out", type=Path, help="the file (default: RUN/step-N.pt)")
    save.add_argument(
        "--no-data", action="store_true", help="leave weights, states and the batch out of the file"
    )
    save.add_argument(
        "--trust", action="store_true", help="import the classes that config.yaml names"
    )
    save.set_defaults(do=_save)
    for name, do, about in (
        ("replay", _replay, "run a saved step, and compare it with eager"),
        ("bisect", _bisect, "find where a saved step first differs from eager"),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument("file", type=Path, metavar="FILE", help="a file of perfect-step save")
        command.add_argument("--budget", help="bytes (8GiB) or a share (60%%); default: the run's")
        command.add_argument("--engine", choices=ENGINES, default="auto")
        command.add_argument(
            "--import",
            dest="modules",
            action="append",
            default=[],
            metavar="MODULE",
            help="a module that registers operations of the step",
        )
        command.set_defaults(do=do)
    return run_command(parser, lambda args: _refusing(args.do, args), argv)


def _refusing(do: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Do it, and print why it cannot be done."""
    sys.stderr.write("importing PyTorch\n")
    with importing():
        from offload import OffloadError
        from perfect.errors import PerfectError
        from trainers.read_checkpoint import CheckpointRefused
    try:
        return do(args)
    except (OffloadError, PerfectError, CheckpointRefused, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _save(args: argparse.Namespace) -> int:
    with importing():
        from rich.console import Console

        from perfect.commands.replaying import save_step
        from perfect.errors import RunError
    if args.step < 1:
        raise RunError(f"--step {args.step} is no step: the first one is 1")
    silence_lightning()
    out = args.out or args.run / f"step-{args.step}.pt"
    console = Console(soft_wrap=True)
    result = save_step(args.run, args.step, out, console, data=not args.no_data, trust=args.trust)
    print_plain(console, result)
    return 0


def _replay(args: argparse.Namespace) -> int:
    from offload.replaying.bisection import replay

    step, budget, engine = _open_step(args)
    differing: dict[str, str] = {}
    results = unplanned = 0
    for part in step.parts:
        replayed = replay(part, budget, engine)
        unplanned += replayed.plan is None
        differing |= replayed.differing
        results += replayed.results
    what = f"{step.title}: {results} results of {len(step.parts)} parts"
    if unplanned:
        what += f" ({unplanned} without a plan)"
    if not differing:
        _write(f"{what}, every bit is equal to eager's")
        return 0
    _write(f"{what}, {len(differing)} differ from eager:")
    for name, where in differing.items():
        _write(f"  {name}: {where}")
    return 1


def _bisect(args: argparse.Namespace) -> int:
    from offload.replaying.bisection import bisect

    step, budget, engine = _open_step(args)
    for number, part in enumerate(step.parts):
        fault = bisect(part, budget, engine)
        if fault is not None:
            _write(f"{step.title}, part {number + 1} of {len(step.parts)} ({part.step})")
            _write(f"  first differs from eager: {fault.stage}")
            _write(f"  task: {fault.task or 'none can be named'}")
            _write(f"  value: {fault.value}")
            return 1
    _write(f"{step.title}: every bit is equal to eager's after each pass, in the plan and engine")
    return 0


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _open_step(args: argparse.Namespace) -> tuple["SavedStep", "Budget", str | None]:
    """Return the step, the budget of its parts, and the engine."""
    with importing():
        import torch

        from offload.replaying.bisection import budget_bytes
        from offload.replaying.step_file import read_step
        from perfect.assembly.own_class import import_own_module
        from perfect.errors import RunError

        for name in args.modules:
            import_own_module(name)
    step = read_step(args.file)
    if step.torch != torch.__version__:
        sys.stderr.write(
            f"the step was saved with torch {step.torch}, and this is {torch.__version__}\n"
        )
    on_gpu = any(part.device.startswith("cuda") for part in step.parts)
    if on_gpu and not torch.cuda.is_available():
        raise RunError(
            f"{args.file} was saved on a GPU, and there is none here: run it where one is"
        )
    torch.set_num_threads(step.threads)
    budget = step.budget if args.budget is None else budget_bytes(step.parts, args.budget)
    return step, budget, None if args.engine == "auto" else args.engine


if __name__ == "__main__":
    sys.exit(main())
