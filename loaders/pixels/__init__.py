"""Decoding turns bytes into pixels, and augmentation changes them.

May import: blocks, errors.
"""
