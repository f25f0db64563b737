"""`kvtide serve`: an engine behind HTTP. `app` has the routes, `service` the engine's thread.

docs/ARCHITECTURE.md (section "server") says what each module owns.
"""
