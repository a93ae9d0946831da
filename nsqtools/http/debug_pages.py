"""The pages below /debug/pprof of a daemon, as far as a Python process has them.

``goroutine`` has the stacks of all threads and tasks. The other profiles are measured from outside
(`py-spy`), because a profiler inside would slow down the loop that it measures.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
import threading
import traceback
from itertools import islice

from nsqtools.http.http_server import Request, Response, plain_response

MAX_TASKS = 200  # a page of them takes some milliseconds
_STACKS = "goroutine"
_INDEX = f"/debug/pprof/\n\n{_STACKS}: stacks of threads and tasks\n"


def show_debug_page(request: Request) -> Response:
    """Answer with the index, a profile, or 501 for a profile that a Python process lacks."""
    if not request.option:
        return plain_response(_INDEX)
    if request.option == _STACKS:
        return plain_response(_stacks())
    pid = os.getpid()
    text = f"a Python process has no such profile; py-spy record --pid {pid} measures one\n"
    return plain_response(text, 501)


def _stacks() -> str:
    """Return the stacks of all threads, and of tasks of this loop."""
    frames, text = sys._current_frames(), io.StringIO()
    for thread in threading.enumerate():
        text.write(f"thread {thread.name}\n")
        if frame := frames.get(thread.ident or 0):
            text.writelines(traceback.format_stack(frame))
        text.write("\n")
    tasks = asyncio.all_tasks()
    for task in islice(tasks, MAX_TASKS):
        task.print_stack(file=text)
        text.write("\n")
    if len(tasks) > MAX_TASKS:
        text.write(f"{len(tasks) - MAX_TASKS} more tasks\n")
    return text.getvalue()


DEBUG_HANDLERS = dict.fromkeys(
    [("GET", "/debug/pprof/"), ("GET", "/debug/pprof/:option")], show_debug_page
)
