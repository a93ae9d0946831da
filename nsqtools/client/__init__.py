"""The NSQ client core: connections, Consumer, Producer and discovery.

One I/O thread owns all sockets of the Consumers and Producers of a process; what to send when (RDY,
backoff, reconnecting) is decided by pure modules that are fed events and a clock reading.
"""
