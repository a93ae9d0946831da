"""Messages as data: envelope, templates, filters, framing, and units of the command line.

Pure: no files, sockets, clocks or threads. A message is any `MessageLike`. Its topic and nsqd are
separate arguments, because all messages of a batch share them.
"""
