"""Does a transport keep the rules? Checks for any transport, yours too, with real processes.

`transport_conformance`  the kit, and its command; start here
`sound_checks`           bytes, order, sizes, refusals, the quota
`failure_checks`         peers that are killed or frozen, late bytes, revocation
`conformance_peer`       the processes that the checks start
"""
