"""Tries pipelines with the code that PYTHONPATH names, a process each, one after the other.

    python -m surveyed_pipelines.pipeline_host FOLDER LIMIT NUMBER NAME  NUMBER NAME ...

The processes are forks of one that has imported torch and our code. FOLDER/NUMBER.json has the
attempts; those that are there already are not made again.
"""

import gc
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from surveyed_pipelines.pipeline_case import Pipeline
from surveyed_pipelines.pipeline_facts import attempt, reference
from surveyed_pipelines.pipeline_registry import pipelines
from surveyed_pipelines.pipeline_rows import Attempt, PipelineRow

PRELOADED = "surveyed_pipelines.pipeline_host", "loaders.workers.worker"


def main() -> None:
    folder, limit = Path(sys.argv[1]), float(sys.argv[2])
    children: Any = multiprocessing.get_context("forkserver")
    children.set_forkserver_preload([*PRELOADED])
    for number, name in zip(sys.argv[3::2], sys.argv[4::2], strict=True):
        answer = folder / f"{number}.json"
        if answer.exists():
            continue
        row = PipelineRow(name, tuple(_tried_within(children, name, folder / number, limit)))
        print(f"{name} | {row.status} | {row.last.change or row.refused}", flush=True)
        answer.write_text(json.dumps([asdict(each) for each in row.attempts]))


def _tried_within(children: Any, name: str, work: Path, limit: float) -> list[Attempt]:
    work.mkdir(parents=True, exist_ok=True)
    answer = work / "answer.json"
    child = children.Process(target=_try, args=(name, work / "data", answer, work / "log.txt"))
    child.start()
    child.join(limit)
    told = json.loads(answer.read_text()) if answer.exists() else []
    attempts = [Attempt(**each) for each in told]
    if child.exitcode is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
        attempts.append(Attempt("", "hung", f"no end after {limit:g} s"))
    elif child.exitcode != 0:
        attempts.append(Attempt("", "crashed", f"exit code {child.exitcode}"))
    shutil.rmtree(work / "data", ignore_errors=True)
    return attempts


def _try(name: str, folder: Path, answer: Path, log: Path) -> None:
    """In a process of its own. What libraries print goes to `log`."""
    os.setsid()  # so that it can be killed with the processes that it has started itself
    kept = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(kept, 1)
    os.dup2(kept, 2)
    gc.freeze()  # collecting would copy all that came with the fork
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    case = pipelines()[name]
    # The loaders' processes come from this server, which imports only once what they need.
    multiprocessing.set_forkserver_preload([*PRELOADED, *case.packages])
    forkserver.ensure_running()
    attempts: list[Attempt] = []
    for made in tried(case, folder):
        attempts.append(made)
        answer.write_text(json.dumps([asdict(each) for each in attempts]))


def tried(case: Pipeline, folder: Path) -> Iterator[Attempt]:
    """An attempt for each form, up to the first one that is not refused."""
    missing = [one for one in case.packages if importlib.util.find_spec(one) is None]
    if missing:
        yield Attempt("", "missing", f"pip install {' '.join(missing)}")
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case.prepare(folder)
    try:
        plain = reference(case, folder)
    except Exception as error:
        traceback.print_exc()
        yield Attempt("", "broken", f"{type(error).__name__}: {error}")
        return
    for form in case.forms():
        began = time.perf_counter()
        try:
            made = attempt(case, form, folder, plain)
        except Exception as error:
            traceback.print_exc()
            made = Attempt(form.change, type(error).__name__, str(error))
        yield replace(made, seconds=time.perf_counter() - began)
        if not made.error:
            return  # served, or served wrongly: no later form may hide that


if __name__ == "__main__":
    main()
