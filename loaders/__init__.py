"""source -> decode -> reuse buffer -> augment -> batch. Imports none of our other packages.

Files in the order in which a sample flows: `sources` (which samples, in which order), `decoding`
(bytes to pixels), `storage` (the slab of slots), `reuse` (who is served when; pure), `augment`
(fresh randomness per serve), `prefetch` (the only threads), `loader` (`ReuseLoader`). All of them:
docs/architecture.md.
"""

from loaders.errors import LoaderError
from loaders.loader import ReuseLoader

__all__ = ["LoaderError", "ReuseLoader"]
