"""nsqtools: one `nsq` command and a synchronous client for the NSQ message queue."""

__version__ = "0.1.0"
