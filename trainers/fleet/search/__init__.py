"""Optuna decides which jobs a fleet trains, and which of them it stops early.

May import: fleet, fleet.deciding, fleet.jobs, fleet.keeping, record_file, plain_values.
"""

from trainers.fleet.search.optuna_names import optuna_pruner_of, optuna_search_of
from trainers.fleet.search.optuna_pruner import OptunaPruner
from trainers.fleet.search.optuna_search import OptunaSearch

__all__ = ["OptunaPruner", "OptunaSearch", "optuna_pruner_of", "optuna_search_of"]
