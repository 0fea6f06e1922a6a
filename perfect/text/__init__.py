"""Prepares text for language models: bytes -> tokens of GPT-2's vocabulary -> blocks of one length.

bpe       text <-> token ids, in pure Python
wikitext  a folder with WikiText-2 and the vocabulary -> train, valid and test blocks

May import: loaders.errors.
"""

from perfect.text.bpe import Bpe, read_bpe
from perfect.text.wikitext import TestText, WikiText, blocks, read_wikitext

__all__ = ["Bpe", "TestText", "WikiText", "blocks", "read_bpe", "read_wikitext"]
