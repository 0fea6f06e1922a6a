"""What an object is made of, as a digest: its values, arrays, code, and the files that it names.

May import: errors, pixels, sources, torch_seams.
"""
