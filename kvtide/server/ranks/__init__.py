"""The processes of a server with several ranks.

`rank_processes`   started, watched, ended
`rank_worker`      the process of a rank that is not the leader
"""
