"""`redis://…`: pages in a Redis or Valkey server.

`redis_store`  the store; start here
`reading`      the commands that read objects, in pieces
`connections`  the connections, and the thread pool that uses them
`resp`         the wire protocol
"""

from kvtide.storage.redis.redis_store import RedisStore

__all__ = ["RedisStore"]
