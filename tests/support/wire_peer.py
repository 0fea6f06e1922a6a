"""A peer in a process of its own: it says hello to the port that it is given, and waits.

It is written after the description of the protocol, with nothing of ours: it starts at once.
"""

import hashlib
import hmac
import json
import socket
import ssl
import struct
import sys

if __name__ == "__main__":
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    tls = context.wrap_socket(socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20))
    tls.settimeout(None)
    seen = hashlib.sha256(tls.getpeercert(binary_form=True) or b"").digest()
    mine = b"n" * 32
    tls.sendall(b"PFEG\0\2" + mine)
    theirs = tls.recv(38)[6:]
    proved = b"perfect-training elastic wire 1\0client" + mine + theirs + seen
    tls.sendall(hmac.digest(b"the secret of this test", proved, "sha256"))
    assert tls.recv(33)[:1] == b"\1"
    header = json.dumps({"kind": "hello", "fields": {}, "payloads": []}).encode()
    tls.sendall(b"PFEW" + struct.pack("!HI", 2, len(header)) + header)
    sys.stdin.read()
