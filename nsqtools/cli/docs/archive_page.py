"""nsq-archive(5): the files of an archive. Prose written by hand, in the markup of `roff`."""

from __future__ import annotations

from nsqtools.cli.docs import roff

PROSE = """
# NAME

nsq-archive - the files that nsq to-file writes

# SYNOPSIS

*topic*`.`*host*`.`*datetime*`.log`, *topic*`.`*host*`.`*datetime*`.log.gz`

# DESCRIPTION

An archive is a directory of files. Each file has messages of one topic, in the order of their
arrival, in one of two formats, plain or compressed with gzip. What a file is called is decided by
`--filename-format` of `nsq to-file`; nothing that reads archives depends on it. A file is told from
another by what is in it: gzip by its first bytes, messages with their envelope by their first line.

A file whose name does not begin with a dot is finished: it is complete, on disk, and never changed
again. Everything that begins with a dot belongs to the program, and is passed over by shell
patterns, by `nsq` and by Spark and Hadoop.

# FORMATS

`jsonl`::
  Each message is a line of JSON, its *envelope*. Any body comes back byte for byte.
  `nsq tail --json` prints the same lines, and `nsq pub --format jsonl`, `nsq replay` and Spark read
  them.

`raw`::
  Each message is its body and a delimiter, by default a newline, as nsq_to_file writes it. Topic,
  time and id are not kept, and a body that has the delimiter in it is read as several.

## The envelope

    {"topic": "clicks", "nsqd": "host:4150", "id": "0f3a6c1e9b2d4f58",
     "ts": 1795251600000000000, "attempts": 1, "body": "a=1"}

A line (it is broken here only) has these keys, in this order. It never has a newline in it, and it
is UTF-8.

`topic`::
  The topic the message was published to.

`nsqd`::
  The address under which the nsqd was reached that the message came from.

`id`::
  The 16 characters by which that nsqd knows the message. Ids of several nsqd may be the same: a
  message is identified by topic, nsqd and id together.

`ts`::
  When it was published, by the clock of its nsqd, in nanoseconds since 1970, UTC.

`attempts`::
  How often it had been delivered, this time included, up to 65535.

`body`::
  The body, where it is UTF-8.

`body64`::
  In place of `body`, where it is not: the body in base64.

# MEMBERS AND THE INDEX

A file is a sequence of *members*. A member is what became durable in one flush: a gzip member, that
can be uncompressed by itself, or in a plain file a range of bytes. The index says where they are.
It is the hidden file `.`*name*`.index` beside the file *name*, in lines of text:

    writer 5b1c2f0e8d9a4e6f9c3b7a1d2e4f6081 17
    0 48211 2104 1795251600012345678 1795251601001234567
    48211 47790 2088 1795251601001299999 1795251602000456789

The first line names the file for as long as it exists, whatever it is called and wherever it is
moved: a writer, drawn at random by the first archiver of the topic and channel in a directory, and
the number of the file among those of that writer. No two files have the same. Files of early
versions have no such line.

Every other line is a member: its offset and its length in bytes of the file as it is on disk, how
many messages it has, and the lowest and the highest time of publishing in nanoseconds, 0 where that
is unknown. Members follow each other without a gap. A line counts when its newline is there.

A file can be read without its index. With it, a reader skips what is outside of a range of time,
splits one file between several processes, and goes on behind a damaged member.

# HIDDEN FILES

`.`*name*`.index`::
  The index of a file, finished or in progress.

`.`*name*`.part`::
  A file in progress. It is locked while a process writes it. What it has behind the last member of
  its index is not durable, and is cut off after a crash; the messages come again from nsqd.

`.`*name*`.copy`::
  A finished file on its way from `--work-dir` on another file system.

`.`*topic*`@`*channel*`.lock`::
  Locked by the process that archives the channel here, so that there is only one. Its line has the
  process id, the writer, and the number of the last file that was begun.

`.`*topic*`@`*channel*`@`*run*`-`*number*`.journal`::
  Which messages were written lately, so that one that is delivered again is not written again. A
  line has the offset and the length of a member, an nsqd, the ids of the messages from there (in
  hex, 32 digits each), and the name of the file. It is written before the member is, and counts
  when that is in the index; once the next run has looked, the line `proved` says so. Journals of
  earlier runs are kept for a week.

`.`*name*`.damaged`::
  A file as it was before `nsq archive repair` mended it.

# ORDER OF WRITING

A flush appends the member and syncs the file, appends the line to the index and syncs it, and only
then are the messages finished with nsqd. A file is finished by placing its index, then giving it
its name, which must not be taken, and syncing the directory. So a finished file has all of its
messages, and each message is on disk or still with nsqd, whatever happens, `kill -9` and power
failures included. `nsq to-file` mends what a crash left when it starts; so does
`nsq archive repair`.

# EXAMPLES

Count the messages of a day, and show the topics and ids of those that came more than once:

    zcat /var/nsq/clicks.*.2026-11-21_*.log.gz | wc -l
    zcat /var/nsq/*.log.gz | jq -r 'select(.attempts > 1) | [.topic, .nsqd, .id] | @tsv'

The bodies alone: those that are text, and all of them byte for byte:

    zcat /var/nsq/clicks.*.log.gz | jq -r '.body // empty'
    nsq archive cat --bodies /var/nsq

The members of a file, and the second one alone:

    cat .clicks.host.2026-11-21_08.log.gz.index
    tail -c +48212 clicks.host.2026-11-21_08.log.gz | head -c 47790 | zcat

What is in the files, and whether it is whole:

    nsq archive info /var/nsq
    nsq archive verify /var/nsq

# SEE ALSO

{see_also}
"""

PAGES = (
    "nsq",
    "nsq-archive",
    "nsq-archive-cat",
    "nsq-archive-info",
    "nsq-archive-repair",
    "nsq-archive-verify",
    "nsq-replay",
    "nsq-to-file",
)


def render_archive_page() -> str:
    """The page."""
    see_also = roff.references([(name, 1) for name in PAGES])
    return roff.page([*roff.title("nsq-archive", 5), *roff.prose(PROSE, {"see_also": see_also})])
