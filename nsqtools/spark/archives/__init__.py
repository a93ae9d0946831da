"""``nsq-archive`` as plain objects: nothing here knows Spark, and only reading knows Arrow.

    settings     what the options say
    folders      the files below a directory, again and again
    listing      which files there are, told apart by writer and number whatever they are called
    content      what is in a file: messages, bare bodies, nothing
    damage       what cannot be read: fails the query, or is written down and counted
    plan         files into ranges of members, ranges into partitions
    batch        a plan for all there is
    offsets      how far a stream has read: a value, and its JSON
    admission    how far the next batch goes, under limits
    stream       what a stream's reader answers
    texts        a range of a file into pieces of whole lines
    lines        text into columns: the fast way, and the exact one
    reading      a partition into Arrow record batches

Planning is done by one process on the driver; executors get partitions, and open files.
"""
