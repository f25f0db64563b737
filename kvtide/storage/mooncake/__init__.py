"""`mooncake://host:port` Mooncake Store: one pool of memory over many machines.

`mooncake_store`     the store; start here
`mooncake_settings`  the settings of a URL, and the environment that the library reads
`library`            loading the library, and the meaning of its codes
`library_threads`    threads that call it, so that no caller waits past its deadline
`registered_memory`  registered buffers for objects that lie elsewhere
"""

from kvtide.storage.mooncake.mooncake_store import MooncakeStore

__all__ = ["MooncakeStore"]
