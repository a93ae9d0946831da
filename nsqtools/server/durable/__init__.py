"""``--durable``: a log of everything that would be lost in a kill or a power failure.

    records      what stands in the log: bytes to values and back
    log          segments on disk, and one sync for all publishes of a moment
    journal      what happens to one queue, as records
    checkpoint   begin a new log that holds what lives, and remove the old one
    recovery     turn a log into the files of an nsqd that was stopped in order

A publish is confirmed after its record is synced, and only then is the message put into the queues,
so nobody gets a message that could still be refused. What happens to it later (delivered, deferred,
finished) is written within milliseconds, and not waited for: a kill in between only delivers it
again. The queues work as without the log; those on disk just do not sync, and keep the files that
they have read until the next checkpoint.

A log always becomes queue files before anything else is done with it. So the Go nsqd can open the
directory after a stop in order, or after ``nsq nsqd --recover-only``.
"""
