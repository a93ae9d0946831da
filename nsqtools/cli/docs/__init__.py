"""Completions, manual pages and the tables of README.md, rendered from the command tree.

    python -m nsqtools.cli.docs            write what is committed; run it in the top directory
    python -m nsqtools.cli.docs --check    name what differs, change nothing; status 1 if any does

`tree` reads the commands as plain data; each other module renders one kind of document from it:

    bash zsh fish      completions/
    man                man/*.1, and with `pages` (prose) man/*.5
    tables             the blocks between markers in README.md

A rendering is the same on every machine: no dates, host names or paths go into it.
"""
