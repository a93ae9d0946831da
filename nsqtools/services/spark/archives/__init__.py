"""``nsq-archive`` as plain objects: nothing here knows Spark, and only reading knows Arrow.

settings     what the options say
listing      which files there are, told apart by writer and number whatever they are called
content      what is in a file: messages, bare bodies, nothing
damage       what cannot be read: fails the query, or is written down and counted
plan         files into ranges of members, ranges into partitions
offsets      how far a stream has read: a value, and its JSON
admission    how far the next batch goes, under limits
stream       the four together: what a stream's reader answers
lines        text into columns: the fast way, and the exact one
reading      a partition into Arrow record batches
"""
