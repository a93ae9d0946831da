"""Forward a topic to a table of PostgreSQL; each message is finished when its row is committed.

    python postgres_sink.py DSN NSQD TOPIC CHANNEL DEAD_LETTER_FILE

A message that comes twice is one row. Needs psycopg. nsq-python(7) explains what a sink is.
"""

import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg

from nsqtools import Fate, Outcome, forward_to

TABLE = """CREATE TABLE IF NOT EXISTS messages (topic text, nsqd text, id text,
    published timestamptz, body jsonb, PRIMARY KEY (topic, nsqd, id))"""
INSERT = "INSERT INTO messages VALUES (%s, %s, %s, to_timestamp(%s), %s) ON CONFLICT DO NOTHING"


class PostgresSink:
    def __init__(self, dsn):
        self._dsn, self._database = dsn, None
        self._thread = ThreadPoolExecutor(1)

    def parts(self, parcel):
        return [parcel.part(at, at + 500) for at in range(0, len(parcel), 500)]

    def submit(self, parcel, report):
        self._thread.submit(lambda: report([parcel], self._insert(parcel)))

    def check(self):
        pass

    def stop(self, timeout_s):
        self._thread.shutdown()

    def _insert(self, parcel):
        of = parcel.messages
        try:
            rows = [
                (of.topic, of.nsqd, m.id.decode(), m.timestamp_ns / 1e9, body.decode())
                for m, body in zip(of, parcel.bodies, strict=True)
            ]
            if self._database is None or self._database.closed:
                self._database = psycopg.connect(self._dsn, autocommit=True)
                self._database.execute(TABLE)
            with self._database.transaction(), self._database.cursor() as cursor:
                cursor.executemany(INSERT, rows)
        except (psycopg.DataError, UnicodeDecodeError) as error:  # some of them are to blame
            return Outcome(Fate.REFUSED, str(error), may_split=True)
        except psycopg.OperationalError as error:  # none of them is: they wait until it works
            return Outcome(Fate.UNREACHABLE, str(error))
        except Exception as error:
            return Outcome(Fate.FAILED, repr(error))
        return Outcome(Fate.DELIVERED)


if __name__ == "__main__":
    dsn, nsqd, topic, channel, letters = sys.argv[1:]
    place = {"nsqd_tcp_addresses": nsqd, "dead_letter_file": letters}
    forwarder = forward_to(PostgresSink(dsn), topic, channel, **place)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=forwarder.stop).start())
    forwarder.run()
