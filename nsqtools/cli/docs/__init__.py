"""Completions, manual pages and the tables of README.md, rendered from the command tree.

    python -m nsqtools.cli.docs            write what is committed; run it in the top directory
    python -m nsqtools.cli.docs --check    name what differs, change nothing; status 1 if any does

`tree` reads the commands as plain data; each other module renders one kind of document from it:

    bash zsh fish                 completions/
    man                           man/man1, a page a command
    config_page archive_page      man/man5, prose with tables
    tables                        what stands between markers in README.md

`documents` has all of them by their path, for the command and the tests.

A rendering is the same on every machine: no dates, host names or paths go into it.
"""
