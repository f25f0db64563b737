"""The embedded store: objects in a few large files of one machine, `file:///path?cap=200GB`.

Start with `store`. The other modules, from the disk upwards:

`segments`   the large files that objects lie in
`records`, `journal`   what happened to objects, in records that one process appends
`merging`    one journal out of those of finished processes
`folder`     which files there are, and their locks
`table`      which objects there are, in memory
`catalog`    the table, kept up to date from every process's journal
`writer`     what this process changes: places, records, holes
`opening`    merging, reading, and clearing away what a crash left
`moving`, `workers`   bytes between memory and files, on several threads
`room`       cap, floor and eviction
`putting`    the way of a new object

Why it is built so. A file per object costs ten times its price at 64 KiB, and slots that are used
again need an order between a slot's last reader and its next writer, over processes. So every
process appends to segments of its own and never writes twice in one place: what a reader found
there is either still there or has become a hole, which it can see. For the same reason what lives
is puts less removals, whichever journal is read first and however often; processes share a folder
without a server and without waiting for each other. Evicting an object punches its blocks out of
its segment, so LRU is exact per object, nothing is ever copied to make room, and there are no size
classes.

What always holds:

- An object is in a journal only when all of its bytes are in its segment. An object is
  acknowledged only when it is in a journal.
- A location is given out once. What was removed is a hole for ever.
- After reading, the range is looked at for holes: who was overtaken by a removal says MISSING.
- Live bytes of all spaces together stay under the cap, but for what several processes write at
  one moment. The file system's free space stays above the floor, as far as it is up to us.
- Nothing here trusts a file: records have checksums, lengths are compared, and what does not fit
  is left out and counted. Objects themselves are checked by who reads them (`storage.objects`).

What survives: the end of a process at any moment (SIGKILL too) loses nothing that was
acknowledged, whatever `sync` says, for the system has it all. A loss of power, or a crash of the
system, loses

    sync=always   nothing acknowledged: bytes, then record, are on the disk before `write` returns
    sync=batch    what was written in the last second or two (the default)
    sync=never    what the system had not written by itself

and tears nothing: a record without its bytes points at blocks that read as a hole, or fails the
checksum of the object.

Recency is kept in microseconds of the time of day, per object, in memory. What was used is told
in the journal once a minute and when the store is closed, for the other processes and the next
start; after a kill the order of up to a minute is lost. Two processes that write one object at the
same moment keep both copies until one of them, being used no more, is evicted.
"""

from kvtide.storage.file.file_store import FileStore

__all__ = ["FileStore"]
