"""What `taccl synth --json` says of a product: schema taccl/synth/v1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taccl.produce import Product
    from taccl.synth.algorithm import Algorithm
    from taccl.synth.collective import Groups
    from taccl.synth.symmetric.algorithm import SymmetricAlgorithm


def document(product: Product, path: str | None) -> dict[str, Any]:
    """The JSON document of `taccl synth --json`. path: the file that was written, None for none."""
    from taccl.synth.cost import us

    algorithm, certificate = product.algorithm, product.algorithm.certificate
    time_us = us(algorithm.time_fs)
    name, ranks, partition, messages = _shape(algorithm)
    groups = _groups(algorithm)
    blocks = 0 if product.program is None else sum(len(gpu.threadblocks) for gpu in product.program.gpus)
    return {
        "schema": "taccl/synth/v1",
        "collective": name,
        "size_bytes": algorithm.size_bytes,
        "ranks": ranks,
        "groups": [list(group) for group in groups],
        "topology": algorithm.topology_name,
        "partition": partition,
        "time_us": time_us,
        "simulated_us": us(product.simulated_fs),
        "lower_bound_us": certificate.lower_bound_us,
        "bound_by": certificate.bound_by,
        "gap": certificate.gap(time_us),
        "solver_bound_us": certificate.solver_bound_us,
        "status": certificate.status,
        "proved_by": certificate.proved_by,
        "engine": algorithm.engine,
        "solve_s": round(product.solve_s, 3),
        "ended": product.ended,
        "verified": True,
        "messages": messages,
        "threadblocks": blocks,
        "no_program": product.no_program,
        "coding": _coding(product),
        "not_coded": product.not_coded,
        "path": path,
        "warnings": list(product.warnings),
        "provenance": dict(algorithm.provenance),
    }


def _coding(product: Product) -> dict[str, Any] | None:
    """What a codec gains: the coded schedule and its bound; None where none is used."""
    from taccl.synth.cost import us
    from taccl.synth.gap import gap

    coded = product.coded
    if coded is None or coded.coding is None:
        return None
    plan = coded.coding
    return {
        "codec": plan.cost.codec,
        "dtype": plan.cost.dtype,
        "lossless": plan.cost.lossless,
        "partition": coded.collective.partition,
        "engine": coded.engine,
        "messages": len(coded.messages),
        "coded_messages": len(plan.messages),
        "time_us": us(plan.time_fs),
        "uncoded_time_us": plan.uncoded_time_us,
        "lower_bound_us": plan.lower_bound_us,
        "gap": gap(us(plan.time_fs), plan.lower_bound_us),
    }


def _groups(algorithm: Algorithm | SymmetricAlgorithm) -> Groups:
    from taccl.synth.algorithm import Algorithm

    return algorithm.collective.groups if isinstance(algorithm, Algorithm) else ()


def _shape(algorithm: Algorithm | SymmetricAlgorithm) -> tuple[str, int, int, int]:
    """(collective, ranks, partition, messages)."""
    from taccl.synth.algorithm import Algorithm

    if isinstance(algorithm, Algorithm):
        collective = algorithm.collective
        return collective.name, collective.ranks, collective.partition, len(algorithm.messages)
    return algorithm.collective, algorithm.ranks, algorithm.partition, algorithm.message_count
