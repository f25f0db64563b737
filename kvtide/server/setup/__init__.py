"""From settings to an engine that serves.

`engine_setup`       checkpoint, model, draft, cache, tokenizer, in order
`store_setup`        which store is opened
`speculation_setup`  what drafts tokens
`residency_setup`    which pools live on the host
`batch_setup`        how many requests run at once
"""
