"""Prepares text for language models: bytes -> tokens of GPT-2's vocabulary -> samples.

bpe         text -> token ids
wikitext    a folder with WikiText-2 and the vocabulary -> blocks of one length
text_lines  a folder with texts, one a line -> samples of their own lengths
padding     pads batches of them to a few lengths

May import: loaders.errors.
"""

from perfect.text.bpe import Bpe, read_bpe
from perfect.text.padding import IGNORED, PadToLengths, lengths_for
from perfect.text.text_lines import LineText, TextLines, read_lines
from perfect.text.wikitext import TestText, WikiText, blocks, read_wikitext

__all__ = [
    "IGNORED",
    "Bpe",
    "LineText",
    "PadToLengths",
    "TestText",
    "TextLines",
    "WikiText",
    "blocks",
    "lengths_for",
    "read_bpe",
    "read_lines",
    "read_wikitext",
]
