"""The operations that layers call (`ops`, `kernel_args`), by torch references (`torch_ops`, in the
order of sums of `arithmetic`) or by Triton kernels (`triton_ops`); `choice` takes one per model.

Nothing is imported here: layers, references and kernels import these modules one by one.
"""
