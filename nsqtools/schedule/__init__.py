"""Messages for later: requests are kept in SQLite and published when they are due.

`request` parses requests and computes due times, `store` keeps the entries, `scheduler` consumes
and publishes, and detects jumps of the wall clock.
"""
