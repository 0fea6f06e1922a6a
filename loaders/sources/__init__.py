"""The samples of a data set, and the order in which they are asked for.

May import: closing, errors, pixels.
"""

from loaders.sources.archives import picture_tar
from loaders.sources.datasets import cifar10, picture_folder

__all__ = ["cifar10", "picture_folder", "picture_tar"]
