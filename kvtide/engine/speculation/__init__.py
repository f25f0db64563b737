"""Speculative decoding: a request's next tokens are drafted, verified in one step, and accepted as
far as they are what the target samples.

    propose ─▶ schedule ─▶ verify: the last token and k drafts, k + 1 rows ─▶ accept ─▶ commit
       ▲                                                                                  │
       └──────────────────── extend the draft over accepted tokens ◀──────────────────────┘

The target samples every row with the request's own noise, which depends on its seed, the position
and the token alone. A draft is accepted if it equals the sampled token. So the output is that of an
engine without speculation, at any temperature.

`drafter`         what proposes drafts
`ngram`           prompt lookup: drafts from the request's own tokens
`model_drafter`   drafts by a draft model (EAGLE3, MTP) over the target's pages
`deferred_rows`   tokens that the draft is yet to be extended over
`draft_graphs`    the passes of a draft model as CUDA graphs
`draft_length`    how many drafts a request gets
`round_prices`    what a round costs on this device, measured in the engine's steps
`draft_acceptance`   drafted tokens are compared with sampled ones, on the host or on the device
`saved_states`    recurrent states as they were before the drafts
`accept_length_stats`   what verify steps gave, by the origin of a prefix
`accept_length_guard`   warns of origins whose drafts are accepted less
`speculation`     the parts together, as the engine calls them
"""
