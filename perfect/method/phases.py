r"""Decides which phase a run is in and when the next one begins. Pure; runs can be replayed.

    PRETRAIN  decode once, serve R times     | FINETUNE  every serve fresh
    learning rate constant ----------------- | \
                     plateau, or the budget  ^  \ decay to 0

A run is a list of `Phase`s. `PhasePolicy` gets what happened and returns `Switch`es.
Phases change between passes, so that no decoded sample is thrown away. Time is counted in
epoch-equivalents: served samples / samples of the training set.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from perfect.errors import PhaseError
from perfect.method.plateau import (
    Look,
    Observation,
    PlateauDetector,
    PlateauRule,
    look_from_dict,
)
from perfect.method.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of training. What is None stays as it is in the run or in the user's module."""

    name: str
    reuse: int = 1
    passes: int | None = None
    steps: int | None = None
    """The length in optimizer steps, in place of `passes`."""
    reaugment: bool = True
    batch_size: int | None = None
    lr: Schedule | None = None
    weight_decay: float | None = None
    ema: bool = False
    reset_optimizer: bool = False


def check_phases(phases: Sequence[Phase]) -> list[str]:
    """Return one sentence for each thing that is wrong with a list of phases."""
    problems = [] if phases else ["a run needs at least one phase"]
    for number, phase in enumerate(phases):
        name = f"phase {number} '{phase.name}'"
        lengths = [n for n in (phase.passes, phase.steps) if n is not None]
        if not lengths:
            problems.append(f"{name} never ends: give passes or steps")
        if len(lengths) == 2:
            problems.append(f"{name} has both passes and steps: give one of them")
        if any(n < 1 for n in lengths):
            problems.append(f"{name} must last at least 1 pass or step, not {min(lengths)}")
        if phase.reuse < 1:
            problems.append(f"{name}: reuse must be at least 1, not {phase.reuse}")
        if phase.batch_size is not None and phase.batch_size < 1:
            problems.append(f"{name}: batch_size must be at least 1, not {phase.batch_size}")
    later_reuse = any(p.reuse > 1 for p in phases[1:])
    if phases and len(phases) > 1 and phases[0].reuse == 1 and later_reuse:
        problems.append(
            f"phase 0 '{phases[0].name}' is fine-tuning (reuse 1) but a later phase reuses samples:"
            " pre-train on reused samples first, fine-tune on fresh ones last"
        )
    if phases and phases[0].name == "finetune":
        problems.append("phase 0 is 'finetune', but nothing is pre-trained yet: rename it")
    return problems


@dataclass(frozen=True, slots=True)
class BudgetSplit:
    """`pretrain` passes of `reuse` serves each, then `finetune` fresh passes."""

    pretrain: int
    finetune: int


def budget_split(fresh: float, total: float, reuse: int) -> BudgetSplit:
    """Return the latest switch that spends `fresh` passes of decoding and `total` epochs.

    N + f = F and N R + f = T give f = (R F - T) / (R - 1): every split of the thesis obeys it
    (40x3+80: F=120; 55x3+35: F=90). f is clipped to [0.15, 0.45] of T: shorter fine-tuning leaves
    no steps to decay in, longer fine-tuning wastes decodes. All passes are whole, so this is the
    nearest possible split.
    """
    if reuse < 2:
        raise PhaseError(f"a budget split needs reuse >= 2 in the first phase, not {reuse}")
    if not total / reuse <= fresh <= total:
        raise PhaseError(
            f"{fresh:g} fresh passes cannot give {total:g} epochs at reuse {reuse}: give between"
            f" {total / reuse:g} and {total:g} fresh passes"
        )
    finetune = (reuse * fresh - total) / (reuse - 1)
    finetune = min(max(finetune, 0.15 * total), 0.45 * total)
    pretrain = max(1, round((total - finetune) / reuse))
    return BudgetSplit(pretrain, max(1, round(total - pretrain * reuse)))


SwitchReason = Literal["planned", "plateau", "latest start"]


@dataclass(frozen=True, slots=True)
class Switch:
    """The end of a phase, with its time and its reason."""

    at: float
    step: int
    left: str
    entered: str | None
    reason: SwitchReason
    detail: str


@dataclass(frozen=True, slots=True)
class PhaseState:
    """The progress of a run."""

    index: int = 0
    step: int = 0
    """Optimizer steps done in this phase."""
    passes: int = 0
    """Passes finished in this phase."""
    at: float = 0.0
    """Epoch-equivalents served since the run began."""
    total_steps: int = 0


class PhasePolicy:
    """Walks through a list of phases. With `plateau`, a phase that reuses samples may end early, at
    the end of a pass. The run's length in epoch-equivalents does not change.

    `trace` and `switches` hold all observations and decisions.
    """

    def __init__(self, phases: Sequence[Phase], plateau: PlateauRule | None = None) -> None:
        problems = check_phases(phases)
        if plateau is not None:
            problems += _check_plateau(phases)
        if problems:
            raise PhaseError("; ".join(problems))
        self.phases = tuple(phases)
        self.plateau = plateau
        self.state = PhaseState()
        self.detector = PlateauDetector(plateau) if plateau else None
        self.trace: list[Look] = []
        self.switches: list[Switch] = []
        self._fired = False

    @property
    def phase(self) -> Phase:
        return self.phases[min(self.state.index, len(self.phases) - 1)]

    @property
    def finished(self) -> bool:
        return self.state.index == len(self.phases)

    def served(self, epochs: float, steps: int) -> None:
        """Count a served batch of `epochs` epoch-equivalents, and `steps` (0 or 1) updates."""
        s = self.state
        self.state = replace(
            s, at=s.at + epochs, step=s.step + steps, total_steps=s.total_steps + steps
        )

    def observe(self, seen: Observation, fraction: float) -> Look:
        """Judge the curve when `fraction` of the phase's planned length is done."""
        lr = self.phase.lr
        constant = lr is None or lr.is_constant_at(fraction)
        verdict = None
        is_last = self.state.index >= len(self.phases) - 1
        if self.detector is not None and self.phase.reuse > 1 and not is_last:
            if constant:
                verdict = self.detector.observe(seen)
                self._fired = self._fired or verdict.fired
            else:
                self.detector.changed()
        look = Look(self.phase.name, self.phase.reuse, constant, seen, verdict)
        self.trace.append(look)
        return look

    def end_pass(self) -> Switch | None:
        """Count a finished pass or part of one. Return the switch if the phase ends with it."""
        if self.finished:
            return None
        s = self.state = replace(self.state, passes=self.state.passes + 1)
        phase = self.phase
        over = (phase.passes is not None and s.passes >= phase.passes) or (
            phase.steps is not None and s.step >= phase.steps
        )
        if not over and not self._fired:
            return None
        following = self.phases[s.index + 1].name if s.index + 1 < len(self.phases) else None
        verdicts = [look.verdict for look in self.trace if look.verdict is not None]
        if self._fired:
            reason: SwitchReason = "plateau"
            detail = next(v for v in verdicts[::-1] if v.fired).reason
            self._give_to_last(phase, s.passes)
        elif self.detector is not None and phase.reuse > 1 and following is not None:
            last = f"; last look: {verdicts[-1].reason}" if verdicts else ""
            reason, detail = "latest start", f"no plateau within {_length(phase)}{last}"
        else:
            reason, detail = "planned", f"{_length(phase)} done"
        switch = Switch(s.at, s.total_steps, phase.name, following, reason, detail)
        self.switches.append(switch)
        self.state = replace(s, index=s.index + 1, step=0, passes=0)
        self._fired = False
        if self.detector is not None:
            self.detector.changed()
        return switch

    def _give_to_last(self, left: Phase, passes: int) -> None:
        """Give the epochs that `left` did not use to the last phase, so the run's end stays."""
        last = self.phases[-1]
        if left.passes is not None and last.passes is not None:
            saved = (left.passes - passes) * left.reuse // last.reuse
            last = replace(last, passes=last.passes + saved)
        elif left.steps is not None and last.steps is not None:
            last = replace(last, steps=last.steps + left.steps - self.state.step)
        self.phases = (*self.phases[:-1], last)

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_length": [self.phases[-1].passes, self.phases[-1].steps],
            "state": asdict(self.state),
            "detector": self.detector.state_dict() if self.detector else None,
            "trace": [asdict(look) for look in self.trace],
            "switches": [asdict(s) for s in self.switches],
            "fired": self._fired,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        passes, steps = state["last_length"]
        self.phases = (*self.phases[:-1], replace(self.phases[-1], passes=passes, steps=steps))
        self.state = PhaseState(**state["state"])
        if self.detector is not None and state["detector"] is not None:
            self.detector.load_state_dict(state["detector"])
        self.trace = [look_from_dict(look) for look in state["trace"]]
        self.switches = [Switch(**s) for s in state["switches"]]
        self._fired = state["fired"]


def _length(phase: Phase) -> str:
    if phase.passes is not None:
        return f"{phase.passes} pass{'es' * (phase.passes != 1)}"
    return f"{phase.steps} step{'s' * (phase.steps != 1)}"


def _check_plateau(phases: Sequence[Phase]) -> list[str]:
    problems = [
        f"phase '{p.name}': a plateau can only be detected under a constant learning rate, not"
        f" {p.lr.kind}"
        for p in phases
        if p.reuse > 1 and p.lr is not None and p.lr.kind != "constant"
    ]
    if any(p.passes is None for p in phases) and any(p.steps is None for p in phases):
        problems.append("the plateau rule needs all phases in passes, or all phases in steps")
    if not any(p.reuse > 1 for p in phases[:-1]):
        problems.append("the plateau rule needs a phase with reuse > 1 before the last phase")
    return problems
