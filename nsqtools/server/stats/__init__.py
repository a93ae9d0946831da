"""The stats of an nsqd: /stats as values and as text, and the push to statsd."""
