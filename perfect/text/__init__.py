"""Prepares text for language models: bytes -> tokens of GPT-2's vocabulary -> samples.

bpe         text -> token ids
wikitext    a folder with WikiText-2 and the vocabulary -> blocks of one length
text_lines  a folder with texts, one a line -> samples of their own lengths
padding     pads batches of them to a few lengths

May import: loaders.errors.
"""

from perfect.text.padding import PadToLengths, lengths_for

__all__ = ["PadToLengths", "lengths_for"]
