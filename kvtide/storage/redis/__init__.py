"""`redis://…`: pages in a Redis or Valkey server.

`store`        what a call asks of the server; start here
`reading`      in which pieces objects are asked for
`connections`  the connections to it: in turn, closed when they failed, made anew
`resp`         what goes over one
`crew`         threads that share the work of a call
"""

from kvtide.storage.redis.redis_store import RedisStore

__all__ = ["RedisStore"]
