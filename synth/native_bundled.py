"""A bundled topology inside a native file: its name, and a fingerprint of the numbers that the times rest on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import astuple

import numpy as np

from taccl.errors import UsageError
from taccl.profiles.link_table import LinkTable, link_table
from taccl.profiles.load import library_names, load_topology
from taccl.profiles.topology import Topology
from taccl.synth.json_reader import Place
from taccl.synth.native_topology import read_topology_value, topology_lines


def compact_topology_lines(topology: Topology, links: LinkTable) -> Iterator[str]:
    """The lines between the braces: the name of a bundled topology, else the whole of it."""
    if _is_bundled(topology.name):
        print_of = fingerprint(topology, links)
        bundled = load_topology(topology.name)
        if fingerprint(bundled, link_table(bundled)) == print_of:
            yield f'"library": {json.dumps(topology.name)}, "sha256": "{print_of}"'
            return
    yield from topology_lines(topology)


def read_compact_topology(place: Place) -> Topology:
    """The topology at a place. Raises InvalidInput, also when the bundled one is not what it was."""
    if "library" not in place.mapping():
        return read_topology_value(place)
    place.only("library", "sha256")
    name = place.at("library").text()
    if not _is_bundled(name):
        place.at("library").fail(f"{name!r} is not the name of a bundled topology")
    try:
        topology = load_topology(name)
    except UsageError as error:
        place.at("library").fail(str(error))
    if fingerprint(topology, link_table(topology)) != place.at("sha256").text():
        place.at("sha256").fail(f"the bundled {name} has other numbers here than where the file was written")
    return topology


def fingerprint(topology: Topology, links: LinkTable) -> str:
    """SHA-256 of all that times and nodes depend on, in hexadecimal. Names of links, switches and NICs do not count."""
    # Classes in the order in which links use them.
    _, first, numbers = np.unique(links.link_class, return_index=True, return_inverse=True)
    place = np.argsort(np.argsort(first))
    classes = [links.classes[int(links.link_class[at])] for at in np.sort(first)]
    head = {
        "nodes": [list(node) for node in topology.nodes],
        "ports": [[port.name, str(port.beta_us_per_mb)] for port in topology.ports],
        "reduce": [str(topology.reduce_alpha_us), str(topology.reduce_beta_us_per_mb)],
        "classes": [[str(c.alpha_us), str(c.beta_us_per_mb), str(c.occupancy_us)] for c in classes],
        "links": len(links),
    }
    if topology.codecs:
        head["codecs"] = [[str(value) for value in astuple(cost)[:-1]] for cost in topology.codecs]
    found = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    used = [column for column in links.ports.T if (column >= 0).any()]
    for column in (links.src, links.dst, place[numbers], *used):
        found.update(column.astype("<i8").tobytes())
    return found.hexdigest()


def _is_bundled(name: str) -> bool:
    return name.partition(":")[0] in library_names()
