"""The embedded store: objects in a few large files of one machine, `file:///path?cap=200GB`.

Start with `file_store`. The other modules, from the disk upwards:

`segments`        the large files that objects lie in
`journal`         the log of a process: records of puts, removals and uses
`folder`          the files of the folder, and their locks
`object_table`    all objects, in memory
`folder_catalog`  the table, kept up to date from every process's journal
`file_io`         bytes between memory and files, on several threads
`writer`          the changes of this process: locations, records, holes
`recovery`        opening a folder: merging journals, clearing away the left-overs of a crash
`file_settings`   the settings of a URL, and failure counters
`appends`         the way of new objects, with cap, floor and eviction
`folder_follower`  what is stored, for a process that only reads the journals

Why it is built so. A file per object costs ten times its price at 64 KiB. Slots that are reused
need an order between a slot's last reader and its next writer, over processes. So every process
appends to segments of its own and never writes a location twice: an object that a reader found is
either still there or has become a hole, which the reader can see. For the same reason the live
objects are puts less removals, in whatever order journals are read and however often. Processes
share a folder without a server and without waiting for each other. Evicting an object punches its
blocks out of its segment, so LRU is exact per object, no object is ever copied, and there are no
size classes.

What always holds:

- An object is in a journal only when all of its bytes are in its segment. An object is
  acknowledged only when it is in a journal.
- A location is allocated once. A removed object is a hole for ever.
- After reading, the range is checked for holes: a read that a removal overtook returns MISSING.
- Live bytes of all spaces together stay under the cap, except for what several processes write at
  one moment. The file system's free space stays above the floor, as far as this store affects it.
- No file is trusted: records have checksums, lengths are compared, and misfits are skipped and
  counted. The reader of an object checks the object itself (`storage.objects`).

Crash safety: the end of a process at any moment (SIGKILL too) loses nothing acknowledged, whatever
`sync` is, because the system has it all. A loss of power, or a crash of the system, loses

    sync=always   nothing acknowledged: bytes, then record, are on the disk before `write` returns
    sync=batch    what was written in the last second or two (the default)
    sync=never    what the system had not written by itself

and tears nothing: a record without its bytes points at blocks that read as a hole, or fails the
checksum of the object.

Recency is kept in memory, per object, in microseconds of the time of day. Uses are written to the
journal once a minute and when the store is closed, for the other processes and the next start. A
kill loses the order of up to a minute. Two processes that write one object at the same moment keep
both copies until one of them, unused, is evicted.
"""

from kvtide.storage.file.file_store import FileStore
from kvtide.storage.file.folder_follower import FolderFollower, FolderSpace

__all__ = ["FileStore", "FolderFollower", "FolderSpace"]
