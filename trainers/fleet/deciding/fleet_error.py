"""What is wrong with a fleet as a whole, so that no job of it can go on."""


class FleetError(Exception):
    """The fleet cannot run as it was set up. The text says what, which value and what to do."""
