"""What a job's program raises to leave its device."""


class JobLeft(Exception):
    """The job was asked to leave, and would go on from its checkpoint."""

    def __init__(self, step: int) -> None:
        """`step`: that of its checkpoint, or of its last weights if it will not go on."""
        super().__init__(f"the job left its device after step {step}")
        self.step = step
