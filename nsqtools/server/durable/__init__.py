"""``--durable``: the queues are in a SQLite database, and confirmed means committed.

database     the tables, transactions and pages; what SQLite does not look after itself
store        the side of the loop: what happens in a turn becomes a transaction of one thread
data_path    which files a directory has, and their way to the files of Go's nsqd and back
"""
