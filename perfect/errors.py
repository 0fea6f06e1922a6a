"""What can go wrong in a run, besides what the loader says (loaders/errors.py).

PerfectError
  ConfigError      a YAML with problems, a line each        (exit code 2)
  BuildError       what the data or own classes do not bear out; names the key    (2)
  PhaseError       phases that cannot be run, or not with this module             (2)
  FolderError      a folder that this run may not write to                        (2)
  RunError         a folder that is no run, or cannot be read back as one         (2)
  LossNotFinite    training diverged; the last checkpoint is from before          (1)
  Interrupted      stopped on request, with a checkpoint                        (130)
"""


class PerfectError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(PerfectError):
    """Everything wrong with a configuration, a line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class BuildError(PerfectError):
    """A configuration that the data, or the user's own classes, do not bear out."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key
        self.reason = reason


class PhaseError(PerfectError, ValueError):
    """Phases that cannot be run, or not with this module and loader."""


class FolderError(PerfectError):
    """A folder that this run may not write to."""


class RunError(PerfectError):
    """A folder that is no run, or a run that cannot be read: `what; what to do`."""


class LossNotFinite(PerfectError):
    """The loss became NaN or infinite."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(
            f"the loss was {loss} at step {step}: lower the learning rate, or look at the samples"
            " of that step; the last checkpoint is from before it"
        )
        self.step = step


class Interrupted(PerfectError):
    """The run was asked to stop and left a checkpoint."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step
