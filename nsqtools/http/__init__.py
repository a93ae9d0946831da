"""A client for the HTTP APIs of nsqd and nsqlookupd, and the server of daemons and console."""
