"""Lower bounds: times that no algorithm beats, each with an exact certificate (docs/bounds.md)."""

from taccl.synth.bounds.bound import Bottleneck, Bound, Crossing, ranks_text
from taccl.synth.bounds.compose import granular_bound, lower_bound

__all__ = ["Bottleneck", "Bound", "Crossing", "granular_bound", "lower_bound", "ranks_text"]
