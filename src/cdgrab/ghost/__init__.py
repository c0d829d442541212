"""Gradients of single examples, in the form in which a backward pass leaves them: as factors, not as rows."""

from cdgrab.ghost.records import Lookup, Matrix, Record, Rows

__all__ = ["Lookup", "Matrix", "Record", "Rows"]
