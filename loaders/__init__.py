"""source -> decode -> reuse buffer -> augment -> batch. It imports none of our other packages.

Folders in the order in which a sample flows: `adopting` (what a user already has), `sources` and
`backends` (which samples, read by whom), `streams` (samples that come one by one), `order` (who is
served when; pure), `workers` (threads and processes that read), `identity` (what a data set is made
of), `cache`, `slots` (the slab), `pixels` (decoding and augmentation), `batching` (from slots to a
batch), `passes` (the order of a pass, and its batches in turn). Files beside them put these
together; `loader` has `ReuseLoader`. `sharing` has one such loader for several consumers, `lanes`
deals one out to virtual ranks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loaders.public_names import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import the public names when one is first asked for: `loaders.order` needs no torch."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    return getattr(import_module("loaders.public_names"), name)
