"""Pools that live on the host while requests run: tables of a step, hits and misses."""
