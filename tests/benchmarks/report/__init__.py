"""``tests/benchmarks report``: measure what README and nsq-benchmarks(7) claim.

    command.py       the command: each part in a process of its own, one failure ends no other
    parts.py         what is measured: programs beside their peers
    raw.py           what was measured, kept in tests/benchmarks/results, one file a part
    pages.py         the tables, made of that alone
    tables.py        one table for programs side by side

A figure in the text is never typed: it comes from the raw data, and a test compares.
"""
