"""Sketches: what an author asks of the algorithms for a cluster, and the rules that follow on a topology."""

from taccl.sketches.load import load_sketch, sketch_names
from taccl.sketches.restrict import check_sketch, restrict

__all__ = ["check_sketch", "load_sketch", "restrict", "sketch_names"]
