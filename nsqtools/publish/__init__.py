"""Publish records from files or a stream, and know what became of every one of them.

`source` reads records promptly and in batches, `rate` paces them, `publisher` sends, retries and
counts, `job` puts them together.
"""
