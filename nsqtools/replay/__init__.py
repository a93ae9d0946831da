"""Put archived messages back into topics: merged by time, paced, confirmed, and resumable."""
