"""What `kvscope bench peers` runs in a peer's own environment: plain scripts that import the peer and nothing of kvscope.

`child.py NAME` speaks the protocol, `NAME_peer.py` is the peer: one class `Peer` with `about` (how it was configured, in
words), `generate` and `serve`. They are started by path, so that the environment needs no kvscope.
"""
