"""The NSQ wire protocol as pure functions and values, for both sides of the wire.

Nothing here opens a socket, reads a clock, starts a thread or logs. The client core and the
embedded nsqd use the same modules in opposite roles.
"""
