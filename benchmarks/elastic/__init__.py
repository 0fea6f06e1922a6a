"""The suite `elastic`, a part a file."""
