"""Triton kernels of recurrent layers: convolution, selective scan, gated delta, output norm."""
