"""The processes of a server with several ranks.

`rank_processes`   started, watched, ended
`rank_worker`      the process of a rank that is not the leader
`rank_channels`    heartbeats and failures, between the leader and every other rank
`step_watch`       notices a step that does not end
"""
