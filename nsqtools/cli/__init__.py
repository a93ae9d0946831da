"""The ``nsq`` command: thin. Parsing and printing are here; what a command does is in services.

To add a command:

1. Write ``commands/<name>.py`` with one function. Its docstring is the help: the first line says
   what it does, the end is a block ``Examples:``. Its parameters are aliases of `params`
   (``topic: Topics``), and, after a ``*``, whole values that are made from a set of options:
   ``connection: ConsumerConnection`` (see `connection`) and ``runtime: Session`` (see `runtime`).
   Import services inside the function: its help page must not load the client.
2. Enter it in `registry` with the docstring's first line.
3. Return nothing, or an `ExitStatus`. Raise our errors and print none: `failures` does.

Data goes to stdout through `output` or ``runtime.write``; ``runtime.tell`` says things on stderr;
`progress` shows how far it is. A command that runs until it is stopped runs inside
`signals.stopping`.
"""
