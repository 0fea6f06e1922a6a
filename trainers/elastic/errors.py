"""The errors of elastic training."""


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


class ReducingError(ElasticError):
    """Base of what goes wrong in a group of one generation.

    The members form a group again by themselves.
    """


class GroupBroken(ReducingError):
    """The group of this generation is of no use any more."""


class FrameError(ReducingError):
    """A header or a vote is larger than was agreed."""


class FixedPointError(ReducingError):
    """A number has no place in the range of fixed-point sums.

    Lower the learning rate, or give `sum: fast`.
    """
