"""Bytes in flight: between the device and the host, and between the host and a store.

`transfers`         PLANNED → RESERVED → IN_FLIGHT → LANDED | FAILED, and all that are not over
`copy_jobs`         from page moves to strided copies, in groups of layers
`lane`              one direction of the link: a supervised thread, jobs and tickets
`timeline`          the order of work on the device: streams and events, or nothing
`strided`           the one copy primitive, and the backend of a CPU (`Reference`)
`backends`          which backend and host layout work where
`copy_engine`, `copy_kernel`, `measured_backend`   the backends of a GPU
`row_kernel`        rows at any addresses, in one launch of a kernel
`triton_copies`     imports kernels that copy, where Triton is installed
`store_link`        a store's thread pools: look-ups, reads and writes beside the engine
`storage_requests`  what was asked of a store, and how far it has come
`host_pages`        host pages as the objects that a store keeps
`breaker`           when to stop asking a store that fails, and when to try again
`read_speed`        how fast a store is read
`shapes`            stored pages of ranks of another shape
`peer`              bytes to and from another process
"""
