"""Codecs: pages in fewer bytes, in any store. `?codec=` in a store's URL asks for one.

`coded_store`    the wrapper: any store, with a codec
`coder`          what a codec is, and `lossless`
`fp8_codec`      `fp8`: which rows of an object are rounded
`fp8_rows`       vectors of numbers in eight bits
`planes`         byte planes of numbers, of any element width
`zstd`           the system's libzstd
`coded_object`   a coded object's label and checksum
`coder_threads`  encoding and decoding beside the calls of the store
`opening`        from the URL's settings to the wrapper
"""

from kvtide.storage.codec.coded_store import CodedStore

__all__ = ["CodedStore"]
