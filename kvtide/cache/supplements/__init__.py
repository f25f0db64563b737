"""Draft pages for pages that are held without them.

`supplements`          from the host to the device
`supplement_fetching`  from storage to the host
"""
