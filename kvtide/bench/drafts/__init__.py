"""What drafts are worth, and what they cost.

`speculate`        decoding with drafts beside decoding without
`restored_drafts`  how many drafts are accepted behind restored prefixes
`draft_cost`       what a draft's pages cost the index and the cache
"""
