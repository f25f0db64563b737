"""The processes of a server with several ranks.

`rank_nodes`          which ranks are on which machine, where they meet, their secret
`rank_processes`      the leader's side: ranks started, watched, ended
`node_processes`      the command of a machine that is not the leader's
`worker_processes`    the processes of one machine
`rank_worker`         the process of a rank that is not the leader
`rank_channels`       heartbeats and failures, between the leader and every other rank
`rank_group`          joining the process group
`network_interfaces`  the interface of an address
`step_watch`          notices a step that does not end
"""
