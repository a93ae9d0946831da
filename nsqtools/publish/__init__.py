"""Publish records from files or a stream, and know what became of every one of them.

`publish_job` reads records promptly and in batches, `pacing` paces them, `publisher` sends, retries
and counts.
"""
