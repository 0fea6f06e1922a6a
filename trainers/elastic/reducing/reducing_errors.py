"""What goes wrong in a group of one generation.

ReducingError
  GroupBroken      the group cannot be formed or used any more: abandon it, form the next one
  FrameError       a header or a vote is larger than was agreed
  FixedPointError  a number has no place in the fixed-point range: NaN, infinite or too large
"""

from trainers.elastic.errors import ElasticError


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
