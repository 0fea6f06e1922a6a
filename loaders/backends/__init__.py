"""Other ways to decode, one file each, chosen by name. None yet: native decoding is `decoding`."""
