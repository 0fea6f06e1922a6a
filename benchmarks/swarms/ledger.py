"""What a swarm has committed, counted from what its peers have written down.

logs         who added which lanes at which step     -> steps that lack, lanes that lack or double
serves       which samples a lane had                -> samples that lack or were taken too often
digests      the weights after each step             -> steps at which two peers differ
"""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainers.elastic.peer.step_log import read_history


@dataclass(slots=True)
class Account:
    """Of one run. Everything but `steps` and `serves` is to be empty."""

    steps: int
    serves: int = 0
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.twice or self.diverged)


def account(
    folders: Sequence[Path], lanes: int, steps: int, samples: int, reuses: Sequence[int]
) -> Account:
    """`folders`: of all peers that ever were, killed ones too. Passes that are whole are counted
    sample by sample: each of `samples` was served as often as `reuses` says for that pass."""
    logs = [log for folder in folders for log in folder.glob("elastic/*.jsonl")]
    history = read_history(logs)
    found = Account(steps)
    serves = _serves(folders)
    taken: dict[int, Counter[int]] = defaultdict(Counter)
    last_pass = 0
    for step in range(steps):
        commit = history.commits.get(step)
        if commit is None:
            found.lost.append(f"step {step} is in no log")
            continue
        added = Counter(lane for _, own in commit.added for lane in own)
        found.twice += [f"step {step}: lane {v} {n} times" for v, n in added.items() if n > 1]
        for lane in range(lanes):
            computed = serves.get((step, lane), set())
            if len(computed) > 1:
                found.diverged.append(f"step {step}: lane {lane} had different samples at peers")
            if computed and lane not in added:
                found.lost.append(f"step {step}: lane {lane} was not added")
            for pass_index, ids in computed:
                taken[pass_index].update(ids)
                last_pass = max(last_pass, pass_index)
                found.serves += len(ids)
    for pass_index in range(last_pass):  # the last one may have been left half way
        count, reuse = taken[pass_index], reuses[min(pass_index, len(reuses) - 1)]
        found.lost += [
            f"pass {pass_index}: sample {sample} {count[sample]} times of {reuse}"
            for sample in range(samples)
            if count[sample] < reuse
        ]
        found.twice += [
            f"pass {pass_index}: sample {sample} {many} times of {reuse}"
            for sample, many in count.items()
            if many > reuse
        ]
    for step, digests in sorted(digests_of(folders).items()):
        if len(digests) > 1:
            found.diverged.append(f"after step {step}: {sorted(digests)}")
    return found


def digests_of(folders: Sequence[Path]) -> dict[int, set[str]]:
    """The digests of the weights after each step, of all peers."""
    found: dict[int, set[str]] = defaultdict(set)
    for folder in folders:
        for line in _lines(folder / "digests.txt"):
            step, digest = line.split()
            found[int(step)].add(digest)
    return found


def _serves(folders: Sequence[Path]) -> dict[tuple[int, int], set[tuple[int, tuple[int, ...]]]]:
    found: dict[tuple[int, int], set[tuple[int, tuple[int, ...]]]] = defaultdict(set)
    for folder in folders:
        for line in _lines(folder / "serves.jsonl"):
            step, lane, pass_index, ids = json.loads(line)
            found[step, lane].add((pass_index, tuple(ids)))
    return found


def _lines(path: Path) -> list[str]:
    """A kill may have left half a line at the end."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
