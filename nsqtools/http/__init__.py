"""The HTTP APIs of nsqd and nsqlookupd, as a client sees them."""
