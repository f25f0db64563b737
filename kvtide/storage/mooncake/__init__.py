"""`mooncake://host:port` Mooncake Store: one pool of memory over many machines.

`store`     the store; start here
`settings`  what a URL may say, and the environment that the library reads
`library`   loading the library, and what its numbers mean
`crew`      threads that call it, so that nobody waits longer than they want to
`staging`   registered memory for objects that lie elsewhere
"""

from kvtide.storage.mooncake.mooncake_store import MooncakeStore

__all__ = ["MooncakeStore"]
