"""Archives: files of a topic's messages that stay complete and correct through any crash.

A *file* consists of *members*, each of which became durable in one flush: a gzip member, or in a
plain file a range of bytes. Its *index* has one line for each member. A file in progress and its
index are hidden; a finished file appears whole, under its own name (`layout`).

Every flush keeps one order: the member is appended and fsynced, then its line of the index, and
only then its messages are FINished. So every member in the index is durable, and the messages of
any other are still in the queue of nsqd. After a crash, `part_file` cuts files back to their index
and finishes them, and the `journal` recognizes the redelivered messages that are written already.
"""
