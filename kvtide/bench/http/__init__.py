"""What HTTP costs: the same conversations on an engine alone and over HTTP, in turns.

    this process: engine ──▶ engine_users                          a round on the engine alone
                  engine, service, app ◀──HTTP──▶ http_users       the same round over HTTP
                                                  (processes)

`turn_times`    when a turn was asked and answered, and figures of many
`engine_users`  users who submit to the engine, on its own thread
`http_users`    users in a process of their own, with a connection each
`both_ways`     the rounds, and the server between them
`stand_in`      a model that computes nothing, on a device whose steps take a stated time
"""
