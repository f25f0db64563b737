"""CUDA graphs of steps.

`step_graphs`    which sizes of steps are captured, and filling one for a step
`graph_inputs`   what changes from one replay to the next, in one buffer
`graph_capture`  capture and replay of a forward pass, and their stand-in on a CPU
"""
