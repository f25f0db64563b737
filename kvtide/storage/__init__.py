"""Page stores: they keep prefixes beyond the process and the machine.

`store`        the protocol every store keeps, third-party ones too; start here
`objects`      what a stored page looks like, byte for byte
`store_registry`  from a URL to a store; `url` takes URLs apart
`conformance`  checks that any store must pass, for tests and for users
`trial`        objects to try a store with
`file`         the embedded store: a few large files of one machine
`memory_store`  a dictionary, for tests
`redis`, `s3_store`, `mooncake`   servers that people already run
`codec`        any store with its objects in fewer bytes
`bounce_buffers`  memory for objects that a store does not read or write in place
"""

from kvtide.storage.objects import (
    CorruptObjectError,
    LabelledFormat,
    ObjectFormat,
    object_formats,
)
from kvtide.storage.store import Removed, Store, StoreError, StoreStatus
from kvtide.storage.store_registry import open_store

__all__ = [
    "CorruptObjectError",
    "LabelledFormat",
    "ObjectFormat",
    "Removed",
    "Store",
    "StoreError",
    "StoreStatus",
    "object_formats",
    "open_store",
]
