"""Collective algorithms synthesised for the links a cluster really has.

The pipeline is profile -> sketch -> instance -> algorithm -> program -> run; each arrow is a function
on frozen values (see docs/architecture.md).
"""

__version__ = "0.1.0"
