"""`buffer_bytes`: what the loader says it takes, what it takes, and what it never does."""

import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support import loader_datasets as sets
from support.products import every_value

from loaders import ReuseLoader, Workers
from loaders.errors import BufferTooSmall
from loaders.pipeline import AHEAD, HELD
from loaders.pixels.augmentation import Chain, Flip, RandomResizedCrop
from loaders.pixels.color import Normalize, ToFloat

pytestmark = pytest.mark.cold

PICTURE = 3 * 8 * 8
LABEL = 8
SAMPLE = PICTURE + LABEL


# ---- what it says -------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4, 7])
@pytest.mark.parametrize("reuse", [1, 3])
def test_slots_and_batches_together_stay_below_the_limit_and_use_it(
    batch_size: int, reuse: int
) -> None:
    limit = (AHEAD + HELD + 3) * batch_size * SAMPLE + SAMPLE // 2
    threads = Workers(2, "thread" if reuse == 1 else "auto")  # else torch's own serve reuse 1
    with ReuseLoader(
        sets.Pictures(60), batch_size, reuse, buffer_batches=50, buffer_bytes=limit, workers=threads
    ) as loader:
        for _ in range(2):
            for _ in loader:
                assert loader.stats.buffer_bytes == 3 * batch_size * SAMPLE
                # Blocks of a last, smaller batch may wait while whole ones are made.
                waiting = (AHEAD + HELD) * max(batch_size * LABEL, 60 % batch_size * SAMPLE)
                assert loader.stats.buffer_bytes + loader.stats.batch_bytes <= limit + waiting


def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    with ReuseLoader(sets.Pictures(40), 4, 3, buffer_batches=2, workers=1) as free:
        whole = sets.served(free)
    options: dict[str, Any] = {"buffer_batches": 2, "buffer_bytes": 10**6, "workers": 2}
    with ReuseLoader(sets.Pictures(40), 4, 3, **options) as limited:
        assert sets.served(limited) == whole
        assert limited.stats.buffer_bytes == 2 * 4 * SAMPLE


def test_too_small_a_limit_says_which_one_would_do() -> None:
    least = (AHEAD + HELD + 1) * 4 * SAMPLE
    loader = ReuseLoader(sets.Pictures(40), 4, 3, buffer_bytes=least - 1, workers=1)
    with pytest.raises(BufferTooSmall, match=rf"{least - 1} is too small.*need {least};") as error:
        list(loader)
    loader.close()
    told = re.search(r"need (\d+);", str(error.value))
    assert told
    with ReuseLoader(
        sets.Pictures(40), 4, 3, buffer_batches=9, buffer_bytes=int(told[1]), workers=1
    ) as enough:
        assert len(sets.served(enough)) == 30
        assert enough.stats.buffer_bytes == 4 * SAMPLE


@pytest.mark.parametrize("step", [ToFloat(), Normalize((0.5,), (0.2,))])
def test_floats_lie_in_the_memory_of_batches_and_those_that_are_kept_stay(step: Any) -> None:
    augment = Chain([RandomResizedCrop(8), Flip(), step])
    options: dict[str, Any] = {"reuse": 2, "workers": 1, "seed": 3, "augment": augment}
    with ReuseLoader(sets.Pictures(96), 4, **options) as loader:
        batches = iter(loader)
        kept = [(pictures, pictures.clone()) for pictures, _ in islice(batches, 10)]
        # The bytes that the floats were made of take a quarter, and are used again at once.
        assert loader.stats.batch_bytes >= sum(pictures.nbytes for pictures, _ in kept)
        kept += [(pictures, pictures.clone()) for pictures, _ in batches]
    assert {pictures.dtype for pictures, _ in kept} == {torch.float32}
    assert all(torch.equal(pictures, then) for pictures, then in kept)


# ---- pictures of many sizes ---------------------------------------------------------------------


def sized(spread: float, seed: int, limit: int, **changes: Any) -> ReuseLoader:
    return ReuseLoader(
        sets.Sized(300, spread, seed), 4, 2, buffer_batches=60, buffer_bytes=limit, workers=2,
        augment=Chain([RandomResizedCrop(8)]), **changes,
    )  # fmt: skip


@pytest.mark.parametrize("seed, spread", every_value(range(6), [0.1, 0.5]))
def test_pictures_of_many_sizes_never_take_more_than_the_limit(spread: float, seed: int) -> None:
    limit = 400_000
    with sized(spread, seed, limit) as loader:
        try:
            for _ in loader:
                assert loader.stats.buffer_bytes + loader.stats.batch_bytes <= limit
        except BufferTooSmall as error:
            assert f"at most {limit - (AHEAD + HELD) * 4 * SAMPLE}" in str(error)


# ---- what it takes ------------------------------------------------------------------------------

CHILD = """
import sys
import numpy as np, torch
from loaders import ReuseLoader, Workers
from loaders.pixels.augmentation import Chain, RandomResizedCrop

BATCH, LIMIT, varied = 8, {limit}, {varied}

class Large:
    def __len__(self):
        return 1200
    def __getitem__(self, i):
        side = 224 - (i * 7 % 32 if varied else 0)
        return torch.full((3, side, side), i % 251, dtype=torch.uint8), i

def resident():
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

def run(limit, passes=1):
    crop = Chain([RandomResizedCrop(64)])
    with ReuseLoader(Large(), BATCH, 2, buffer_batches=500, buffer_bytes=limit, workers=2,
                     augment=crop) as loader:
        for _ in range(passes):
            for _ in loader:
                pass
        return loader.stats
torch.set_num_threads(1)
run(5_000_000)  # code, threads and a first slab are there
before = resident()
stats = run(LIMIT, 2)
print(resident() - before, stats.buffer_bytes, stats.batch_bytes)
"""
CONSTANT = 12 << 20
"""Pictures that are being decoded, torch's and Python's own; the first, small run is less."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux")
@pytest.mark.parametrize("varied", [False, True], ids=["one size", "many sizes"])
def test_the_process_grows_by_the_limit_and_no_more(varied: bool) -> None:
    limit = 120_000_000
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(limit=limit, varied=varied)],
        capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grown, slots, batches = (int(word) for word in done.stdout.split())
    assert slots + batches <= limit
    assert grown <= 1.02 * limit + CONSTANT
    # The slots are written to in full, so what is accounted for is there.
    assert grown >= 0.8 * slots - CONSTANT
