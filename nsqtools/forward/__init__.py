"""Forward topics to another cluster, or to HTTP; each message is finished once it is there.

`forwarder` is the engine, `topic_sources` what it consumes, `nsq_sink` and `http_sink` where it
delivers, `dead_letter_box` where what cannot be delivered is kept.
"""
