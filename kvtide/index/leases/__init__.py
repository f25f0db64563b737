"""What callers hold, from its beginning to its end.

`leasing`          pin a prefix, reserve slots, release it all
`commits`          computed pages become part of the tree
`lease_slots`      in which slots a lease's pages are
`arrivals`         copies between tiers: begun, then landed or failed
`imports_exports`  pages that come from a store, and pages that go to one
`sidecar_imports`  optional sidecars that pages lack, from a store
`quarantine`       pages that no match may find again
"""
