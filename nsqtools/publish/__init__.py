"""Publish records from files or a stream, and account for every record.

`input` reads records in batches, `publish_job` checks and publishes them, and `publisher` paces,
sends, and counts outcomes.
"""
