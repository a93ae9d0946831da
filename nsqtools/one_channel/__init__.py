"""Messages for one channel: NSQ publishes to topics, and each channel gets a copy.

A temporary nsqd joins the cluster, with messages in the queue of one channel only
(`temporary_nsqd`); `ChannelPublisher` fills it, in place of a `Publisher`.
"""
