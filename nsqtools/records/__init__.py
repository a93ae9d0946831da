"""Messages as data: envelope, templates, filters, framing, and the units people write.

Pure: no files, sockets, clocks or threads. A message is anything that looks like `MessageLike`; its
topic and its nsqd are beside it, since a batch shares them.
"""
