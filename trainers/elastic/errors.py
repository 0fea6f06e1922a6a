"""The errors of elastic training.

ElasticError
  WireError        what goes wrong between two peers: trainers/elastic/wire/wire_errors.py
  GenerationEnded  a member has died, or the anchor says that the next generation begins
  Expelled         this peer is no member any more, and can join again
  SwarmRefused     the swarm does not take this peer
  SwarmStopped     every member ends the run, for example because a loss is no number
  LogDamaged       a swarm's log that cannot be read or begun, or logs that disagree
  ReplayDiffers    a step that comes to other gradients than the log says
  CannotBeElastic  a module, loader or Trainer that a swarm cannot train exactly
"""


class ElasticError(Exception):
    """Base of everything that elastic training raises on purpose."""


class GenerationEnded(ElasticError):
    """The generation is over: members go to the gate, and the step goes on in the next one.

    Nothing is to be done.
    """


class Expelled(ElasticError):
    """This peer is no member any more.

    Start it again: it joins as a new peer.
    """


class SwarmRefused(ElasticError):
    """The swarm does not take this peer.

    Give this node the key that the message names as the others have it.
    """


class SwarmStopped(ElasticError):
    """Every member ends the run.

    Start the peers again: they go on from the last checkpoint.
    """


class LogDamaged(ElasticError):
    """A log of a swarm cannot be read or begun, or logs disagree.

    Give `perfect-replay` the logs of other peers of the same run; free some space for a new one.
    """


class ReplayDiffers(ElasticError):
    """A step comes to other gradients than the log says.

    Look for versions or data that differ between the machines.
    """


class CannotBeElastic(ElasticError):
    """A run has a part that a swarm cannot train exactly.

    Leave out the part that the message names, or train on one node.
    """
