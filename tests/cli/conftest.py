"""Commands talk to the servers that `tests/server` opens."""

from tests.server.conftest import _everybodys, bare_folder, client, model_folder, serve, server

__all__ = ["_everybodys", "bare_folder", "client", "model_folder", "serve", "server"]
