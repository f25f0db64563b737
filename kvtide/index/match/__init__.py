"""The one rule of reuse: how deep may a prompt resume?

`match` asks it of the tree, and of bitmaps for what a store holds.
"""
