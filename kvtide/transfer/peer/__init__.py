"""Rows of pages written straight into the memory of another process, and messages beside them.

`transport`             the protocol: exposed memory, links, batches of writes; start here
`transport_registry`    transports by name
`shm`                   one machine: the receiver's host arena is shared memory
`mooncake_engine`       Mooncake's TransferEngine: TCP or RDMA
`nixl_agent`            NIXL over UCX
`cpu_copies`            many small rows on a CPU; `device_copies` from a GPU
`send_staging`          memory that rows are gathered in before a library sends them
`worker_link`           a link whose library blocks, on a thread of its own
`tail_rows`             where a peer writes the last page of a prompt
`page_sender`           one thread that writes for all rooms, in order, within a quota
`channel`               authenticated messages between two processes, in frames of `channel_wire`
`process_watch`         is a process of this machine still there
`conformance`           does a transport keep the rules
"""
