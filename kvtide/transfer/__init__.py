"""Bytes in flight between the device and the host: copies, threads, time.

`transfer`   what is on its way: PLANNED → RESERVED → FLYING → LANDED | FAILED
`traffic`    all transfers that are not over; several become one submission
`copier`     from moves to strided copies, in groups of layers
`lane`       one direction of the link: a supervised thread, jobs and tickets
`timeline`   the order of work on the device: streams and events, or nothing
`strided`    the one copy primitive
`backends`   which backend works where; `reference`, `kernel`, `direct`, `auto` are the four
"""
