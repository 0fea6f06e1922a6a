"""What every test gets: its tier, a leak police, and small data sets.

    pytest                 tier `test`: units, properties with few examples, a smoke of each seam
    pytest --tier ci       every behaviour once: products by pairs (products.py)
    pytest --tier all      full products, long runs, large models: what is marked `full` too

A folder or file that is named on the command line is collected whatever the tier.
"""

import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from PIL import Image
from support.slow_tests import SlowTests
from support.warm_python import WarmPython

HERE = Path(__file__).parent
# Processes that tests start import `support`, and the packages beside these tests.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)
SMOKE = (
    # a loader: against torchvision's folder, in a Trainer, in processes, resumed, cached
    "integration/test_plug_in.py::test_a_folder_and_a_tar_of_pictures_give_what_image_folder_gives",
    "integration/test_lightning.py::test_an_epoch_is_a_pass_in_another_order_each_time",
    "integration/test_loader_processes.py::"
    "test_processes_serve_what_threads_do_and_read_it_as_often",
    "integration/test_loader_processes.py::test_a_resume_may_change_who_reads",
    "integration/test_loader_cached.py::test_a_second_loader_on_the_same_folder_decodes_nothing",
    # the method and the program
    "integration/test_phase_switch.py::"
    "test_phases_change_reuse_rate_and_length_and_the_estimate_is_honest",
    "e2e/test_train.py::test_a_run_leaves_everything_that_is_promised",
    "e2e/test_train.py::test_check_tells_what_would_run_and_leaves_nothing",
    "e2e/test_train.py::test_own_module_and_own_data_run_from_the_yaml",
    "e2e/test_grid.py::test_a_grid_leaves_its_results_and_a_page_over_all_jobs",
    "e2e/test_offload.py::test_check_explains_a_plan_for_every_batch_size_and_trains_nothing",
    # a step within a budget: on the host's engines, its peak, its picture
    "integration/test_offload_models.py::"
    "test_five_steps_in_random_order_leave_the_bits_of_eager[gpt]",
    "integration/test_offload_models.py::test_the_real_peak_is_no_more_than_the_planned_one[vit]",
    "integration/test_offload_explain.py::test_a_captured_step_is_explained_and_drawn",
    # private names of torch and Lightning
    "integration/test_seams.py",
    "integration/test_torch_seams.py",
    "integration/test_lightning_seams.py",
    # OffloadStrategy: clipping and accumulation, validation, an error of the user's
    "integration/test_live_strategy.py::"
    "test_a_run_is_plain_lightnings_to_the_last_bit[accumulated and clipped-60%-cpu]",
    "integration/test_offload_strategy_evaluation.py::"
    "test_a_model_larger_than_the_budget_gives_the_bits_of_plain_lightning[0.3-validate]",
    "integration/test_offload_strategy_faults.py::"
    "test_an_exception_of_the_user_arrives_as_it_is[60%]",
)
"""One test or two of each seam, of a few seconds."""
EVERYTHING = ("unit", "property", "integration", "e2e")
TIERS = {"test": ("unit", "property", *SMOKE), "ci": EVERYTHING, "all": EVERYTHING}
"""What each tier collects under tests/. What is marked `full` is left out but in tier `all`."""
PERCENT = {"test": 25, "ci": 100, "all": 400}
"""How many of the examples that a property asks for it gets: `products.examples`."""
SHARED_MEMORY = Path("/dev/shm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="test", help="what runs: test < ci < all")
    parser.addoption("--slow-tests", action="store_true", help="list the dearest tests at the end")


def pytest_configure(config: pytest.Config) -> None:
    tier = config.getoption("tier")
    for name, percent in PERCENT.items():
        hypothesis.settings.register_profile(name, max_examples=percent, deadline=None)
    hypothesis.settings.load_profile(tier)
    if config.getoption("slow_tests"):
        config.pluginmanager.register(SlowTests())
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(HERE / part) for part in TIERS[tier]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("tier") != "all":
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_collection_finish() -> None:
    """What is imported by now never becomes garbage: no collection walks through it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries tell of objects that are left at the end
    # A thread that hangs must not keep a worker, and so the whole run, from ending.
    threading._register_atexit(  # pyright: ignore[reportAttributeAccessIssue]
        functools.partial(faulthandler.dump_traceback_later, 120, exit=True, file=2)
    )


def leaks() -> list[str]:
    """Threads, processes and shared memory of ours that are still there."""
    threads = [t.name for t in threading.enumerate() if t.name.startswith("perfect-")]
    processes = [f"process {p.name}" for p in multiprocessing.active_children()]
    mine = (f"torch_{os.getpid()}_", f"perfect-{os.getpid()}-")
    files = os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else []
    return threads + processes + [f"shared memory {f}" for f in files if f.startswith(mine)]


@pytest.fixture(autouse=True, scope="session")
def heard_ctrl_c() -> None:
    """What a shell puts into the background (`make test &`) is deaf to it, and so are its
    children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Processes of Python that tests start are forked from one that has imported torch."""
    with WarmPython() as warm:
        yield warm


@pytest.fixture(autouse=True, scope="session")
def rates_of_no_gpu() -> None:
    """A fake GPU (fakecuda/) has no times of its own: plans are made with the planner's rates, and
    every kernel takes as long as every other, so that they are the same on a busy machine."""
    if "FAKE_CUDA" in os.environ:
        from offload.graph.costs import Costs
        from offload.measuring import calibration, stopwatch

        def time_once(self: stopwatch.Gpu, run: stopwatch.Run) -> float:
            run()
            return 1e-5

        stopwatch.Gpu.time_once = time_once

        calibration.ON_GPU = calibration.ON_CPU  # the products that measure a GPU take minutes
        calibration.calibrate = lambda device, precision, devices=1: Costs()


@pytest.fixture
def equal_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel takes as long as every other: no busy machine decides where a step is cut."""
    from offload.measuring.profiling import measure_tasks

    def measure(graph: Any, costs: Any) -> Any:
        tasks = measure_tasks(graph, costs).tasks
        return graph.with_tasks([replace(task, seconds=1e-5) for task in tasks])

    monkeypatch.setattr("offload.live.planned_tapes.measure_tasks", measure)


@pytest.fixture(autouse=True)
def cold_if_marked(request: pytest.FixtureRequest, warm_python: WarmPython) -> None:
    warm_python.cold = request.node.get_closest_marker("cold") is not None


@pytest.fixture(autouse=True)
def equal_seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loaders of a test that gives no seed have the same order, except where the drawing of
    seeds is what it is about."""
    if not request.node.get_closest_marker("draws_seeds"):
        monkeypatch.setattr("loaders.arguments.draw_seed", lambda generator: 0)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """A decode thread, a process or shared memory that outlives its test is a leak of that test,
    and not of those after it."""
    before = leaks()
    yield
    if leaks() == before:
        return
    deadline = time.monotonic() + 60
    while True:
        # A generator that was left half way closes when it is collected. A thread that is about to
        # end may still hold what refers to it, so once may not be enough on a busy machine.
        gc.collect()
        if not (leaked := [one for one in leaks() if one not in before]):
            return
        if time.monotonic() > deadline:
            faulthandler.dump_traceback()  # where leaked threads stand
            pytest.fail(f"leaked: {', '.join(leaked)}")
        threading.Event().wait(0.1)


MakePictures = Callable[[Path, dict[str, int]], Path]


@pytest.fixture
def make_pictures() -> MakePictures:
    """`make(root, {"cat": 3, "dog": 2})` writes so many small JPEGs a class under `root`."""

    def make(root: Path, classes: dict[str, int], size: int = 16) -> Path:
        rng = np.random.default_rng(len(classes))
        for name, count in classes.items():
            (root / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
                path = root / name / f"{number:03}.jpg"
                Image.fromarray(pixels).save(path, quality=90, subsampling=0)
        return root

    return make
