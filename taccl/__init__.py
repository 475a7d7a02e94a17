"""Collective algorithms synthesised for the links a cluster really has.

The pipeline is profile -> sketch -> instance -> algorithm -> program -> run; each arrow is a function
on frozen values (see docs/architecture.md). The names below are imported when they are first used.
"""

from __future__ import annotations

# As typing's, which takes longer to import than all else that `taccl` needs to begin.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Algorithm": "taccl.synth.algorithm",
    "Collective": "taccl.synth.collective",
    "ErrorFeedback": "taccl.runtime.codecs.feedback",
    "Job": "taccl.runtime.job",
    "Program": "taccl.synth.program",
    "Request": "taccl.synth.synthesise",
    "TacclError": "taccl.errors",
    "Topology": "taccl.profiles.topology",
    "load_topology": "taccl.profiles.load",
    "lower_exact": "taccl.synth.lower",
    "open_collective": "taccl.running",
    "read_xml": "taccl.synth.msccl_xml",
    "simulate": "taccl.synth.simulate",
    "synthesise": "taccl.synth.synthesise",
    "verify": "taccl.synth.verify",
    "write_xml": "taccl.synth.msccl_xml",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'taccl' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
