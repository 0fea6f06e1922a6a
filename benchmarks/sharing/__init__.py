"""The suite `sharing`, a part a file."""
