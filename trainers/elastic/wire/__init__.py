"""Messages between peers and the anchor: encrypted, authenticated and framed.

A `Listener` lets in who knows the secret, `connect` is the other side, and a `Channel` is what both
get. A message is a kind, fields that JSON can hold, and raw bytes. Nothing is ever unpickled, and
nothing here needs torch, which an anchor has not.

May import: elastic, plain_values.
"""
