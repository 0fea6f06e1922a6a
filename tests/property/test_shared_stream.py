"""Every view of a shared stream is a lone loader, whatever the others do."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.beside_lone import Beside
from support.numbered_samples import loader, settings_of_a_loader
from support.products import examples

from loaders import SharedStream

law = settings(max_examples=examples(60), deadline=None)


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """What consumers do: (what, who of those that are there, how often or which)."""
    what = st.sampled_from(
        ["take"] * 6 + ["leave", "close", "save", "resume", "reuse", "join now", "join", "drop"]
    )
    return draw(st.lists(st.tuples(what, st.integers(0, 9), st.integers(1, 9)), max_size=25))


@law
@given(settings_of_a_loader(), stories(), st.integers(1, 6), st.integers(1, 3), st.data())
def test_every_view_serves_what_a_lone_loader_serves(
    options: dict[str, Any],
    story: list[tuple[str, int, int]],
    window: int,
    lead: int,
    data: st.DataObject,
) -> None:
    options["size"] = max(options["size"], 2 * options["batch_size"])
    stream = SharedStream(loader(**options), lead=lead, window=window)
    there: dict[str, Beside] = {}

    def turns(names: tuple[str, ...]) -> None:
        """Let those take that are waited for."""
        assert set(names) <= set(there), "nobody waits for a view that is gone"
        for name in names:
            there[name].take()

    def join(how: Any) -> None:
        size = stream.view(join="now", name="asked").position.serving.batch_size
        sizes = [n for n in range(1, size + 1) if size % n == 0]
        view = stream.view(data.draw(st.sampled_from(sizes)), join=how)
        view.on_wait = turns
        there[view.name] = Beside(view, options)

    join("now")
    join("now")
    for what, who, number in story:
        if what.startswith("join") and len(there) < 4:
            join("now" if what == "join now" else "next pass")
        name = sorted(there)[who % len(there)]
        one = there[name]
        if what == "take":
            for _ in range(number):
                one.take()
        elif what == "reuse":
            for asking in sorted(there)[: 1 if number % 2 else None]:
                there[asking].view.set_reuse(1 + number // 3)
                there[asking].lone.set_reuse(1 + number // 3)
        elif what == "drop" and len(there) > 1:
            one.lone.close()
            del there[name], one  # nobody holds the view now
        elif what == "close":
            one.leave()
            one.end()
        elif what in ("leave", "save", "resume"):
            getattr(one, what)()
    for name in sorted(there):
        there[name].take()
        there[name].leave()
        there[name].end()
    stream.close()


@law
@given(settings_of_a_loader(), st.integers(1, 9), st.lists(st.integers(0, 2), max_size=60))
def test_a_sample_is_decoded_once_a_pass_for_all_views(
    options: dict[str, Any], window: int, order: list[int]
) -> None:
    options["drop_last"] = False
    stream = SharedStream(loader(**options), window=window)
    views = [stream.view(name=str(number)) for number in range(3)]
    open_ = [iter(view) for view in views]
    served = [0, 0, 0]

    def take(number: int) -> None:
        if served[number] < len(views[number]):
            served[number] += 1
            next(open_[number])

    for view in views:
        view.on_wait = lambda names: [take(int(name)) for name in names]  # type: ignore[assignment]
    for number in order:
        take(number)
    for number in (0, 1, 2):
        while served[number] < len(views[number]):
            take(number)
    assert stream.stats.decoded == options["size"]
    assert stream.stats.served == options["size"] * options["reuse"]
    # The first samples of the next pass were decoded ahead, and counted when nobody came for them.
    stream.close()
    capacity = options["buffer_batches"] * options["batch_size"]
    assert stream.stats.extra_decodes <= capacity


@law
@given(settings_of_a_loader(), st.integers(0, 30), st.integers(1, 5))
def test_a_late_joiner_sees_whole_passes(options: dict[str, Any], before: int, window: int) -> None:
    options["drop_last"] = False
    stream = SharedStream(loader(**options), window=window)
    first = stream.view(name="first")
    taken = iter(first)
    for _ in range(before):
        if next(taken, None) is None:
            taken = iter(first)
            next(taken)
    late = stream.view(join="next pass")

    def take_one(names: tuple[str, ...]) -> None:
        nonlocal taken
        if next(taken, None) is None:
            taken = iter(first)
            next(taken)

    late.on_wait = take_one
    assert not late.state_dict()["served_batches"]
    for _ in range(2):
        ids = np.concatenate([ids.numpy() for _, ids in late])
        assert np.bincount(ids).tolist() == [options["reuse"]] * options["size"]
    assert stream.stats.extra_decodes == 0, "and the stream went on with both"
    first.close()
    late.close()
    stream.close()


# ---- in another process: both ends are in this one, as what goes over the link is the same ------

STEPS = ("take", "take", "take", "leave", "close", "save", "resume", "reuse")
story = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 1), st.integers(1, 9)), max_size=25
)


@law
@given(settings_of_a_loader(), story, st.integers(1, 3), st.data())
def test_every_remote_view_serves_what_a_lone_loader_serves(
    options: dict[str, Any], steps: list[tuple[str, int, int]], lead: int, data: st.DataObject
) -> None:
    options["size"] = max(options["size"], 2 * options["batch_size"])
    batch = options["batch_size"]
    sizes = [n for n in range(1, batch + 1) if batch % n == 0]
    # No view waits for the other one: a single thread reads both.
    with SharedStream(loader(**options), lead=lead, window=9999) as stream:
        two = [
            Beside(stream.remote_view(data.draw(st.sampled_from(sizes))), options) for _ in range(2)
        ]
        for what, who, number in steps:
            one = two[who]
            if what == "take":
                for _ in range(number):
                    one.take()
            elif what == "reuse":
                one.view.set_reuse(1 + number // 3)
                one.lone.set_reuse(1 + number // 3)
            elif what == "close":
                one.leave()
                one.end()
            else:
                getattr(one, what)()
            assert one.view.reuse == one.lone.reuse
        for one in two:
            one.take()
            one.leave()
            one.end()
