"""A loader over a stream: every sample exactly `reuse` times, and a resume after any batch."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.products import examples
from support.reuse_plans import pairs, plans
from support.stream_shards import AUGMENT, Counted, Stateful, decoded, take, watch, write_shards

from loaders import ReuseLoader
from loaders.order.open_end import ENDLESS, walk_stream
from loaders.order.reuse import MODES, ReuseBuffer
from loaders.order.serve import Residents
from loaders.streams import IterableSamples, TarShards

law = settings(max_examples=examples(60), deadline=None)


@dataclass(frozen=True)
class Made:
    """A stream, made anew as often as it is wanted, and how it is served."""

    kind: str
    lengths: tuple[int, ...]
    promised: bool
    options: dict[str, Any]

    @property
    def samples(self) -> int:
        return sum(self.lengths)

    def loader(self, folder: Path, **changes: Any) -> ReuseLoader:
        stream = self.stream(folder, self.samples if self.promised else None)
        return ReuseLoader(stream, **{"augment": AUGMENT, **self.options, **changes})

    def stream(self, folder: Path, samples: int | None, sharded: bool | None = None) -> Any:
        if self.kind != "tars":
            dataset = {"counted": Counted, "stateful": Stateful}[self.kind](self.samples)
            return IterableSamples(dataset, sharded, samples)
        paths = [str(folder / f"shard-{n:03d}.tar") for n in range(len(self.lengths))]
        if not Path(paths[0]).exists():
            write_shards(folder, self.lengths)
        return TarShards(paths, decoded, samples=samples)


@st.composite
def made_streams(draw: st.DrawFn, kinds: tuple[str, ...] = ("tars", "counted", "stateful")) -> Made:
    batch_size = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    drop_last = draw(st.booleans())
    lengths[0] = max(lengths[0], batch_size if drop_last else 1)
    return Made(
        draw(st.sampled_from(kinds)),
        tuple(lengths),
        draw(st.booleans()),
        {
            "batch_size": batch_size,
            "reuse": draw(st.integers(1, 4)),
            "buffer_batches": draw(st.integers(1, 4)),
            "mode": draw(st.sampled_from(MODES)),
            "shuffle": draw(st.booleans()),
            "drop_last": drop_last,
            "seed": draw(st.integers(0, 2**31 - 1)),
            "workers": draw(st.sampled_from([1, 3])),
        },
    )


def in_folder(check: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder))


@law
@given(made_streams())
def test_every_sample_is_served_exactly_as_often_as_it_is_reused(made: Made) -> None:
    def check(folder: Path) -> None:
        with made.loader(folder, drop_last=False) as loader:
            for pass_index in range(2):
                served: Counter[tuple[int, int]] = Counter()
                sizes: list[int] = []
                for numbers, serves, _ in watch(loader):
                    assert len(set(numbers)) == len(numbers) or loader.buffer_batches == 1
                    served.update(zip(numbers, serves, strict=True))
                    sizes.append(len(numbers))
                every = {(i, n) for i in range(made.samples) for n in range(loader.reuse)}
                assert served == Counter(every)
                assert loader.state_dict()["pass"] == pass_index + 1
                if loader.mode != "immediate":
                    assert set(sizes[:-1]) <= {min(loader.batch_size, made.samples)}

    in_folder(check)


@law
@given(made_streams())
def test_who_knows_the_length_and_who_does_not_serve_the_same(made: Made) -> None:
    def check(folder: Path) -> None:
        with (
            replace(made, promised=True).loader(folder) as known,
            replace(made, promised=False).loader(folder) as unknown,
        ):
            for _ in range(2):
                batches = list(watch(known))
                assert batches == list(watch(unknown))
                assert len(batches) == len(known)

    in_folder(check)


@law
@given(made_streams(), st.data())
def test_a_resume_after_any_batch_gives_the_same_tail(made: Made, data: st.DataObject) -> None:
    def check(folder: Path) -> None:
        batches = data.draw(st.integers(0, 25))
        with (
            made.loader(folder) as whole,
            made.loader(folder) as interrupted,
            made.loader(folder, workers=2) as resumed,
        ):
            expected = take(whole, batches + 9)
            head = take(interrupted, batches)
            state = json.loads(json.dumps(interrupted.state_dict()))
            resumed.load_state_dict(state)
            assert resumed.state_dict()["stream"] == state["stream"], "nothing was served since"
            assert head + take(resumed, 9) == expected

    in_folder(check)


@law
@given(made_streams(("tars", "counted")), st.integers(1, 3), st.data())
def test_ranks_share_a_pass_without_doubles_and_in_equally_many_batches(
    made: Made, ranks: int, data: st.DataObject
) -> None:
    def check(folder: Path) -> None:
        even = Made(made.kind, (made.samples,) * ranks, True, made.options)
        less = data.draw(st.integers(0, made.samples - 1))
        promised = (made.samples - less) * ranks
        served: Counter[int] = Counter()
        lengths: set[int] = set()
        for rank in range(ranks):
            stream = even.stream(folder, promised, sharded=False)
            options = {**made.options, "drop_last": False}
            with ReuseLoader(stream, rank=(rank, ranks), augment=AUGMENT, **options) as loader:
                batches = list(watch(loader))
            lengths.add(len(batches))
            served.update(number for numbers, *_ in batches for number in numbers)
        assert len(lengths) == 1
        assert set(served.values()) == {made.options["reuse"]}
        assert len(served) == promised

    in_folder(check)


# ---- a pass whose number of samples nobody knows ------------------------------------------------


@dataclass
class Discovered:
    """An extent that is found out by asking."""

    there: int
    asked: int = 0
    samples: int | None = None

    def reaches(self, samples: int) -> bool:
        self.asked = max(self.asked, samples)
        if samples > self.there:
            self.samples = self.there
        return samples <= self.there


def stands(residents: Residents) -> tuple[list[int], list[int], list[int], int]:
    lists = (residents.positions, residents.served, residents.first)
    return (*(each.tolist() for each in lists), residents.entered)


@law
@given(plans(full=False), st.integers(0, 10**6))
@example(ReuseBuffer(60, 5, 1, 2, "rolling", False, False, (0,)), 11)
def test_whoever_discovers_the_end_serves_what_was_served_if_it_was_known(
    plan: ReuseBuffer, entered: int
) -> None:
    batch = entered % (len(plan) + 1)
    residents, serves = plan.walk(batch)
    unknown = replace(plan, samples=0)
    found, discovered = walk_stream(unknown, batch, Discovered(plan.samples))
    assert stands(found) == stands(residents)
    served = list(discovered)
    assert [pairs(serve) for serve, _ in served] == [pairs(serve) for serve in serves]
    assert [last for _, last in served] == [False] * (len(served) - 1) + [True] * bool(served)


@law
@given(plans(full=False))
def test_nobody_reads_much_further_than_the_buffer(plan: ReuseBuffer) -> None:
    """What was read and has no slot yet is kept as it was read, so it must be a few batches."""
    extent = Discovered(ENDLESS)
    for batch in (0, 1, plan.reuse * plan.buffer_batches, 1000, 1001):
        residents, serves = walk_stream(plan, batch, extent)
        next(serves)
        assert extent.asked - residents.entered <= 2 * plan.capacity + plan.batch_size
