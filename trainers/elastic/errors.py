"""The errors of elastic training.

ElasticError
  WireError        what goes wrong between two peers: trainers/elastic/wire/wire_errors.py
  GenerationEnded  a member has died, or the anchor says that the next generation begins
  Expelled         this peer is no member any more, and can join again
  SwarmRefused     the swarm does not take this peer
  SwarmStopped     every member ends the run, for example because a loss is no number
  CannotBeElastic  a module, loader or Trainer that a swarm cannot train exactly
"""


class ElasticError(Exception):
    """Base of everything that elastic training raises on purpose."""


class GenerationEnded(ElasticError):
    """The generation is over: members go to the gate, and the step goes on in the next one."""


class Expelled(ElasticError):
    """This peer is no member any more. Starting it again lets it join."""


class SwarmRefused(ElasticError):
    """The swarm does not take this peer."""


class SwarmStopped(ElasticError):
    """Every member ends the run."""


class CannotBeElastic(ElasticError):
    """A run has a part that a swarm cannot train exactly."""
