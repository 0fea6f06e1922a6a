"""Messages between peers and the anchor: encrypted, authenticated and framed.

A `Listener` lets in who knows the secret, `connect` is the other side, and a `Channel` is what both
get. A message is a kind, fields that JSON can hold, and raw bytes. Nothing is ever unpickled. Only
`tensors.py` needs torch, which an anchor has not.

    connect(addresses, secret)                 Listener(host, port, secret)
      TCP, TLS 1.3            <------------>     a certificate of this listener alone
      greeting: two nonces, two proofs <--->     each proof holds the certificate's digest
      Channel  --- kind, fields, payloads --->   Channel

May import: elastic, plain_values.
"""
