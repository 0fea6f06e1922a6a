"""The errors of elastic training.

ElasticError
  WireError        what goes wrong between two peers: trainers/elastic/wire/wire_errors.py
"""


class ElasticError(Exception):
    """Base of everything that elastic training raises on purpose."""
