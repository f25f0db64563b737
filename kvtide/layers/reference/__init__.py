"""Torch references: the operations of layers as functions without weights, on any device.

A reference and its kernel have the same file name; those of `attention` are
`kernels/attention/attention_*`. `rope` and `elementwise` are in `layers/`: layers use them too.
"""
