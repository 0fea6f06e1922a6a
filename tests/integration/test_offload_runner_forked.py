"""A runner in a process that is forked from its own: it says so, whatever was going on."""

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from support import stream_graphs as graphs
from support.stage_jobs import DEVICES, ENGINES

import offload
from offload.errors import StepError
from offload.running.engines.cudagraph import CudaGraph
from offload.running.runner import Runner

WAIT = 20.0
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


@pytest.fixture(params=ENGINES[1:])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """With threads for copies and for the host; it replays graphs, where that is what it does."""
    graph = graphs.bound(graphs.chain(host_updates=True), DEVICES[request.param])
    made = offload.plan(graph, placement="copy", recompute=False)
    with Runner(made, request.param, host_workers=2) as found:
        for _ in range(3):
            found(graphs.batch())
        yield found


def in_a_child(call: Callable[[], str]) -> str:
    """What it says in a process forked from this one; nothing, if it hangs."""
    out, back = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(back, call().encode())
        finally:
            os._exit(0)
    os.close(back)
    try:
        said, _, _ = select.select([out], [], [], WAIT)
        return os.read(out, 10_000).decode() if said else ""
    finally:
        os.close(out)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def crew(runner: Runner) -> Any:
    """Of its threads."""
    engine: Any = runner.stage.engine
    return (engine._streams if isinstance(engine, CudaGraph) else engine)._crew


@pytest.mark.parametrize("held", ["", "runner", "crew"])
def test_a_forked_process_is_told_to_make_a_runner_of_its_own(held: str, runner: Runner) -> None:
    """Also where a thread of the parent held a lock in that moment; and it comes to its end."""

    def told() -> str:
        said = []
        for use in (lambda: runner(graphs.batch()), runner.close):
            with pytest.raises(StepError) as raised:
                use()
            said.append(str(raised.value))
        crew(runner).stop()  # as the finalizer does
        return "\n".join(said)

    locks = {"": nullcontext(), "runner": runner.stage.lock, "crew": crew(runner).lock}
    with locks[held]:
        said = in_a_child(told).split("\n")
    assert len(said) == 2
    for line in said:
        assert f"belongs to process {os.getpid()}. " in line
        assert "make a Runner in the child" in line
    assert len(runner(graphs.batch())) == 1
