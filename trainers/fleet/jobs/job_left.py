"""What a job's program raises to leave its device."""


class JobLeft(Exception):
    """The job was asked to leave, and its checkpoint is written."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the job left its device after step {step}")
        self.step = step
