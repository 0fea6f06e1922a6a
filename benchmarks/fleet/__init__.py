"""The suite `fleet`, a part a file."""
