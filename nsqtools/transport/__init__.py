"""Sockets, and nothing but sockets: deadlines, TLS contexts and the stream over them.

Every ``OSError`` becomes one of our errors here, once, with the peer's address in its text.
"""
