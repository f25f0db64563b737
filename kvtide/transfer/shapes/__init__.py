"""Stored pages of ranks of another shape (`other_shapes`)."""

from kvtide.transfer.shapes.other_shapes import OtherShapes, PagePart

__all__ = ["OtherShapes", "PagePart"]
