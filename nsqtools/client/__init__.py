"""The NSQ client core: connections, Consumer, Producer, discovery and the HTTP APIs.

One I/O thread owns all sockets of a Consumer or Producer; what to send when (RDY, backoff,
reconnecting) is decided by pure modules that are fed events and a clock reading.
"""
