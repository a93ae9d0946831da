"""Messages for one channel: NSQ publishes to topics, and each channel gets a copy.

A temporary nsqd joins the cluster with messages in the queue of one channel only (`TemporaryNsqd`).
`ChannelPublisher` takes the place of a `Publisher` and fills that queue. `ChannelDrain` fills one
queue for each channel of an nsqd that is to be removed.
"""
