"""A model keeps no state but what it declares.

`state_check`        three tiny steps before it serves; refuses a model that keeps more
`reachable_tensors`  the tensors that a model references
"""
