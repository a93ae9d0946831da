"""Manual pages, rendered from the command tree and from the guides in man/*.md.

    python .ci/manual            write what is committed; run it in the top directory
    python .ci/manual --check    name what differs, change nothing; status 1 if any does

`tree` reads the commands as plain data; every other module renders one kind of document:

    man         man/man1, one page per command
    markdown    man/man5 and man/man7, from the guides
    tables      what stands between markers in the guides

`documents` has all of them by their path, for the command and the tests.

A rendering is the same on every machine: it contains no dates, host names or paths of the machine.
"""
