"""What an nsqd tells of itself: /stats as values and as text, and the push to statsd."""
