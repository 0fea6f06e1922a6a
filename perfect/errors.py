"""The errors of a run, besides those of the loader (loaders/errors.py), with their exit codes."""

from collections.abc import Sequence


class PerfectError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(PerfectError):
    """A configuration is wrong. The error has one line per problem.
    Correct the lines that it names; `perfect-train --check` looks again and trains nothing.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class BuildError(PerfectError):
    """A key of the configuration does not fit the data or the user's own classes.
    Change the key that it names, or the class that the key leads to.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key
        self.reason = reason
        self.others: list[BuildError] = []
        """Other keys that do not fit, found with this one."""

    @classmethod
    def check(cls, problems: "Sequence[BuildError]") -> None:
        """Raise all of these as one error, if there are any."""
        if problems:
            first, *others = problems
            first.others += others
            raise first


class PhaseError(PerfectError, ValueError):
    """The phases cannot run, or not with this module and loader.
    Change the phases, or the argument of the Trainer that the message names.
    """


class FolderError(PerfectError):
    """This run may not write to the folder.
    Give another folder with `--out`, or the configuration that the folder was begun with.
    """


class RunError(PerfectError):
    """The folder holds no run, or one that cannot be read. The text is `what; what to do`.
    Give the folder of a run.
    """


class LossNotFinite(PerfectError):
    """The loss became NaN or infinite.
    Lower the learning rate, or look at the samples of the step that it names.
    """

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(
            f"the loss was {loss} at step {step}: lower the learning rate, or look at the samples"
            " of that step; the last checkpoint is from before it"
        )
        self.step = step


class Interrupted(PerfectError):
    """The run was asked to stop and left a checkpoint.
    The same command goes on from there.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"the run stopped after step {step}")
        self.step = step


class NotSaved(PerfectError):
    """The final weights or the results of a run could not be written.
    Free some space, and give the same command again: it goes on from the last checkpoint.
    """


class RunFailed(PerfectError):
    """A run of a grid could not be built. The text begins with the key.
    Correct the key, and give the same command again: finished runs are kept.
    """
