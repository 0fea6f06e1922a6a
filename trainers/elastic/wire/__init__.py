"""Messages between peers and the anchor: encrypted, authenticated and framed.

A `Listener` lets in clients that know the secret, `connect` is the other side, and both get a
`Channel`. A message is a kind, fields that JSON can hold, and raw bytes. Nothing is ever unpickled,
and nothing here needs torch, because an anchor has none.

May import: elastic, loaders.closing, plain_values.
"""
