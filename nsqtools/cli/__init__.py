"""The ``nsq`` command: thin. Parsing and printing are here; what a command does is in the packages
of capabilities. CONTRIBUTING.md says how to add one.

The docstring of a command's function is its help. Its parameters are options (see `params`), and,
after a ``*``, whole values that are made from a set of options: ``connection: ConsumerConnection``
(see `connection`) and ``runtime: Session`` (see `runtime`). It returns nothing, or an exit status,
raises our errors, and prints none: `main` does.
"""
