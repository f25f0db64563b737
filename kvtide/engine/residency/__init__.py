"""Pools that live on the host while requests run.

`hot_residency`  their buffers as a step sees them, and the tables of its chunks
`hot_counts`     hits and misses of selected entries, counted on the device
"""
