"""The workers that decode: threads, processes, and the reader that fills a slot.

May import: blocks, cache, closing, errors, order, pixels, slots, sources, torch_seams.
"""
