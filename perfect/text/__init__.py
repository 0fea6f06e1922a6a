"""Prepares text for language models: bytes -> tokens of GPT-2's vocabulary -> samples.

May import: loaders.errors.
"""

from perfect.text.padding import PadToLengths, lengths_for

__all__ = ["PadToLengths", "lengths_for"]
