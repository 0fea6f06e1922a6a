"""The one private name of torch that the loaders use. Seen in torch 2.11 and in 2.15.

Where it is gone, importing this file raises an ImportError that names it.
"""

import torch

try:
    # As `__torch_function__` of a subclass: what is made of its tensors is a plain tensor. Written
    # in Python, the same would be called around every op.
    plain_results = torch._C._disabled_torch_function_impl
except AttributeError as error:
    raise ImportError(
        f"torch {torch.__version__}: {error}. loaders needs it (loaders/torch_seams.py) and was"
        " tested with torch>=2.11,<2.16: install such a version"
    ) from error
