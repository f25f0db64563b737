"""CUDA graphs of steps: capture and replay, inputs, and which sizes there are."""
