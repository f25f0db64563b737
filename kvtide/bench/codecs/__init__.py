"""What codecs are worth on the pages of a real model.

`model_pages`   a text's pages, computed by a model and stored; logits after they were restored
`codec_speed`   bytes and speed of each codec, alone and in a store
"""
