"""What a user already has (a `DataLoader`, transforms, arrays) and what is read from it.

May import: errors, pixels, slots, sources.
"""
