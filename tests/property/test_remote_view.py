"""Every view of a stream in another process is a lone loader. Here both ends are in one process,
because what goes over the link is the same."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.beside_lone import Beside
from support.numbered_samples import loader, settings_of_a_loader
from support.products import examples

from loaders import SharedStream

law = settings(max_examples=examples(60), deadline=None)
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
