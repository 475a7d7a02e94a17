"""What both forms of the native file say first: name, size, time, certificate, where it comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from taccl.synth.algorithm import Algorithm, Certificate
from taccl.synth.json_reader import Place
from taccl.synth.symmetric.algorithm import SymmetricAlgorithm

HEAD = (
    "schema", "name", "engine", "size_bytes", "time_fs", "certificate", "topology_name", "collective",
    "provenance",
)  # fmt: skip
STATUSES = ("optimal", "feasible")
MAX_BYTES = 2**60
MAX_FS = 10**27  # 10^12 s


def head_lines(
    schema: str, algorithm: Algorithm | SymmetricAlgorithm, collective: dict[str, Any]
) -> Iterator[str]:
    """The lines of HEAD's keys, each with a comma. Raises ValueError when provenance is not plain JSON."""
    certificate = algorithm.certificate
    values: list[tuple[str, Any]] = [
        ("schema", schema),
        ("name", algorithm.name),
        ("engine", algorithm.engine),
        ("size_bytes", algorithm.size_bytes),
        ("time_fs", algorithm.time_fs),
        (
            "certificate",
            {
                "lower_bound_us": certificate.lower_bound_us,
                "bound_by": certificate.bound_by,
                "solver_bound_us": certificate.solver_bound_us,
                "status": certificate.status,
                "proved_by": certificate.proved_by,
            },
        ),
        ("topology_name", algorithm.topology_name),
        ("collective", collective),
    ]
    for key, value in values:
        yield f"{plain_json(key)}: {plain_json(value)},"
    yield f'"provenance": {json.dumps(algorithm.provenance, sort_keys=True, allow_nan=False)},'


def read_certificate(place: Place) -> Certificate:
    """The certificate at a place. Raises InvalidInput."""
    place.only("lower_bound_us", "bound_by", "solver_bound_us", "status", "proved_by")
    lower_us, solver_us = (place.at(key).not_negative() for key in ("lower_bound_us", "solver_bound_us"))
    return Certificate(
        lower_us, place.at("bound_by").text(), solver_us, place.at("status").text(STATUSES),
        place.at("proved_by").text(),
    )  # fmt: skip


def read_provenance(place: Place) -> dict[str, object]:
    """The provenance at a place. Raises InvalidInput."""
    place.mapping()
    found: dict[str, object] = place.plain()
    try:
        json.dumps(found, allow_nan=False)
    except ValueError:
        place.fail("a number in it is beyond what a float holds")
    return found


def plain_json(value: Any) -> str:
    """JSON on one line."""
    return json.dumps(value, allow_nan=False)


def separated(rows: Sequence[str]) -> Iterator[str]:
    """The rows of an array or object, with commas between them."""
    return (row + "," * (i + 1 < len(rows)) for i, row in enumerate(rows))
