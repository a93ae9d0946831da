"""Inherited state of a process: ignored and blocked signals, and orphans if it is the first one.

Both pass through exec, and neither shows until a process ends. `main` cleans the signals before any
command runs, so that the programs of commands inherit a clean state too.
"""

from __future__ import annotations

import os
import signal


def clean_inherited_signals() -> None:
    """Reset SIGCHLD and unblock all signals.

    While SIGCHLD is ignored the kernel keeps no exit status, so that a failed command counts as
    successful. While TERM or INT is blocked, neither ends this process. Other ignored signals stay
    ignored, as nohup asks.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def continue_below_init() -> None:
    """Return in a child; this process stays, as the init of a container, until that child ends.

    The first process inherits all orphans, such as background processes of to-exec's commands, and
    each is a zombie until it is waited for. Waiting for all of them in the process that runs the
    command would take the exit statuses of its own children from `subprocess`. Signals are passed
    on, except signals of a terminal (positive si_code), which the kernel sends to the child too.
    """
    clean_inherited_signals()
    wait_for_signal = getattr(signal, "sigwaitinfo", None)
    if wait_for_signal is None:
        return  # macOS, where the first process is never ours
    # blocked before the fork, because the kernel drops unblocked signals of the first process
    signals = signal.valid_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    try:
        child = os.fork()
    except OSError:  # no process can be made: the command still works without an init
        child = 0
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return
    while True:
        info = wait_for_signal(signals)
        if info.si_signo == signal.SIGCHLD:
            _reap(child)
        elif info.si_code <= 0:
            os.kill(child, info.si_signo)  # not reaped yet, so the number is still its own


def _reap(child: int) -> None:
    """Collect every process that has ended, and end as ``child`` did if it is among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)  # while the child runs there is one
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        if not pid:
            return
