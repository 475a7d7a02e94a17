"""Topologies by name or by file: what `--topology` takes.

ndv2:2            two nodes of a bundled profile
torus2d:8x8       a bundled shape of this size
cluster.yaml      a profile file
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from taccl.errors import InvalidInput, UsageError
from taccl.profiles.forms import Values
from taccl.profiles.plain_forms import did_you_mean
from taccl.profiles.profile_file import read_topology
from taccl.profiles.schema import MAX_RANKS, PROFILE
from taccl.profiles.topology import Topology
from taccl.profiles.yaml_reader import parse, read_text, shorten

# What follows the colon of a bundled shape, by its kind and number of dimensions.
FORMS = {
    ("ring", 1): "RANKS",
    ("hypercube", 1): "DIMENSION",
    ("mesh", 2): "ROWSxCOLUMNS",
    ("torus", 2): "ROWSxCOLUMNS",
    ("torus", 3): "XxYxZ",
    ("fat-tree", 2): "LEAVESxRANKS",
}


@dataclass(frozen=True, slots=True)
class LibraryProfile:
    """A bundled profile, for listings."""

    name: str
    parameter: str  # what follows the colon: "nodes" or "size"
    form: str  # of the parameter, e.g. "ROWSxCOLUMNS"
    example: str  # a name with its parameter, e.g. "torus2d:4x4"
    description: str
    source: str  # where its numbers come from
    class_sources: tuple[tuple[str, str], ...]  # (link class, where its numbers come from)


def library_names() -> tuple[str, ...]:
    """The names of the bundled profiles, sorted."""
    files = resources.files("taccl.profiles.library").iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


def library_profile(name: str) -> LibraryProfile:
    """What a bundled profile says of itself."""
    values = PROFILE.read(parse(library_text(name), f"{name}.yaml"))
    assert values is not None, f"the bundled profile {name} cannot be read"
    classes: dict[str, Values] = values.get("classes", {})
    sources = tuple((key, entry.get("source", "")) for key, entry in classes.items())
    shape: Values | None = values.get("shape")
    parameter = "nodes" if shape is None else "size"
    example = f"{name}:{'2' if shape is None else 'x'.join(map(str, shape['size']))}"
    form = "NODES" if shape is None else FORMS[shape["kind"], len(shape["size"])]
    return LibraryProfile(
        name, parameter, form, example, values.get("description", ""), values.get("source", ""), sources
    )


def library_text(name: str) -> str:
    """The YAML of a bundled profile."""
    return (resources.files("taccl.profiles.library") / f"{name}.yaml").read_text("utf-8")


def load_topology(spec: str) -> Topology:
    """The topology that `spec` names: a bundled profile with its count or size, or a profile file.

    Raises UsageError for an unknown name or a count that makes no sense, InvalidInput for a file that cannot
    be read or accepted.
    """
    name, colon, parameter = spec.partition(":")
    if name in library_names():
        return _load_bundled(name, parameter if colon else None)
    if colon and Path(name).is_file() and not Path(spec).exists():
        raise UsageError(
            f"{spec}: {name} is a file, and only a bundled profile takes a parameter (:N) after its name; a file says "
            "how large its cluster is"
        )
    if "/" in spec or spec.endswith((".yaml", ".yml")) or Path(spec).is_file():
        return read_topology(read_text(spec), spec)
    names = library_names()
    hint = did_you_mean(name, names)
    raise UsageError(
        f"there is no bundled profile {name!r} and no such file{'; ' + hint if hint else ''}\n"
        f"bundled profiles: {', '.join(names)} (e.g. ndv2:2, torus2d:4x4)"
    )


def _load_bundled(name: str, parameter: str | None) -> Topology:
    profile = library_profile(name)
    if parameter is None:
        return read_topology(library_text(name), f"{name}.yaml")
    numbers = _numbers(profile, parameter)
    nodes = numbers[0] if profile.parameter == "nodes" else None
    size = numbers if profile.parameter == "size" else None
    full_name = f"{name}:{'x'.join(map(str, numbers))}"
    try:
        return read_topology(library_text(name), f"{name}.yaml", nodes=nodes, size=size, name=full_name)
    except InvalidInput as error:  # the bundled file is right, so what followed the colon is not
        reasons = "; ".join(found.message for found in error.diagnostics)
        raise UsageError(f"{name}:{parameter} cannot be built: {reasons}") from error


def _numbers(profile: LibraryProfile, parameter: str) -> Sequence[int]:
    parts = parameter.split("x")
    if len(parts) != profile.form.count("x") + 1 or not all(
        re.fullmatch("[0-9]{1,9}", part) and 1 <= int(part) <= MAX_RANKS for part in parts
    ):
        many = "numbers" if "x" in profile.form else "a number"
        raise UsageError(
            f"after {profile.name}: stands {profile.form}, {many} from 1 to {MAX_RANKS}, such as {profile.example}; "
            f"found {shorten(parameter)!r}"
        )
    return [int(part) for part in parts]
