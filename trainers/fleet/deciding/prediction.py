"""What a whole run will take, before it begins."""

from dataclasses import dataclass

from trainers.fleet.deciding.fleet_state import FleetState


@dataclass(frozen=True, slots=True)
class Prediction:
    """Not written yet."""

    def said(self) -> str:
        return ""


def predict(state: FleetState) -> Prediction:
    return Prediction()
