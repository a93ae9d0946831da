"""Publish archived messages again: merged by time, paced, confirmed and resumable."""
