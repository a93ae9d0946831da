"""Archives: a topic's messages in files that can be trusted, through any crash.

A *file* consists of *members*, each of which became durable in one flush: a gzip member, or in a
plain file just a range of bytes. Its *index* has one line a member. A file in progress and its
index are hidden; a finished file appears whole, under its own name (`layout`).

The order of every flush makes the promise: the member is appended and fsynced, its index line is
appended and fsynced, and only then its messages are FINished. So what the index names is durable,
and what it does not name is still with nsqd. After a crash `part_file` cuts files back to their
index and finishes them, and the `journal` knows which of the messages that now come a second time
are written already.
"""
