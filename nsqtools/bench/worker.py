"""What a worker process runs: ``python -m nsqtools.bench.worker CONNECTIONS FILENO``.

It gets its job on standard input, answers that it is ready, gets the time at which to begin, and
answers with its result; all of it pickled. It ends when the other side does: its standard input is
open as long as somebody wants the result.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import traceback
from typing import Any

from nsqtools.bench.bench_plan import READY, ConsumerJob, WorkerError
from nsqtools.bench.consuming import ConsumingWorker
from nsqtools.bench.counters import Counters
from nsqtools.bench.publishing import PublishingWorker
from nsqtools.errors import NsqError


def main() -> None:
    """Do one job."""
    connections, fileno = map(int, sys.argv[1:])
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed must not stand between our answers

    def answer(value: Any) -> None:
        pickle.dump(value, stdout)
        stdout.flush()

    logging.disable()  # the receiver of the answer reports how it ended
    try:
        job = pickle.load(stdin)
        counters = Counters(connections, fileno)
        work = (ConsumingWorker if isinstance(job, ConsumerJob) else PublishingWorker)(
            job, counters
        )
        answer(READY)
        begin = pickle.load(stdin)
        threading.Thread(target=_end_with, args=(stdin,), daemon=True).start()
        answer(work.run(begin))
    except EOFError:
        os._exit(1)  # nobody waits for us
    except NsqError as error:
        answer(WorkerError(error.category, str(error), error.hint))
    except Exception:
        answer(WorkerError("failed", traceback.format_exc(), "This is a bug."))
    os._exit(0)  # without waiting for connections that do not answer


def _end_with(stdin: Any) -> None:
    stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
