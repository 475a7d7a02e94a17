"""What of a cluster's algorithms is stale: hashes of inputs and results, kept in a manifest beside the files.

An algorithm is up to date when the hash of everything that decides it (order, topology, sketch, versions) and
the hash of each file are those of the manifest. There are no dates: a build that changes nothing writes
nothing, and the manifest is the same bytes on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from taccl.cluster_file import MANIFEST, Cluster, Wanted
from taccl.errors import Diagnostic, InvalidInput
from taccl.produce import Order
from taccl.profiles.yaml_reader import read_text

SCHEMA = "taccl/manifest/v1"

Entry = dict[str, Any]  # {"inputs": hash, "files": {name: hash}, "time_us": ...}


def inputs_hash(order: Order, texts: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """Hash of all that decides an algorithm. texts: content by role ("topology", "sketch", "pre_post")."""
    options = {key: value for key, value in asdict(order).items() if key not in ("topology", "sketch")}
    options["pre_post"] = None  # where a file lies decides nothing
    whole = {"options": options, "texts": dict(texts), "versions": dict(versions)}
    return digest(json.dumps(whole, sort_keys=True).encode())


def digest(content: bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(content).hexdigest()


def read_manifest(folder: Path) -> dict[str, Entry]:
    """The manifest's entries by stem; empty when there is none. Raises InvalidInput when it is damaged."""
    path = folder / MANIFEST
    if not path.exists():
        return {}
    try:
        found = json.loads(read_text(path))
        entries = found["algorithms"]
        if found["schema"] != SCHEMA or not all(
            isinstance(e["inputs"], str) and isinstance(e["files"], dict) for e in entries.values()
        ):
            raise ValueError(f"expected the schema {SCHEMA}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"this is no manifest of taccl build ({error}); delete it to build everything anew"
        raise InvalidInput([Diagnostic(str(path), 0, 0, "B010", message)]) from error
    return dict(entries)


def manifest_text(entries: Mapping[str, Entry]) -> str:
    """The manifest as JSON, sorted."""
    return json.dumps({"schema": SCHEMA, "algorithms": dict(entries)}, indent=1, sort_keys=True) + "\n"


def why_stale(
    wanted: Wanted, inputs: str, known: Mapping[str, Entry], folder: Path, suffixes: Iterable[str]
) -> str | None:
    """The reason to make an algorithm again, None when it is up to date."""
    entry = known.get(wanted.stem)
    if entry is None:
        return "new"
    if entry["inputs"] != inputs:
        return "its inputs changed"
    for suffix in suffixes:
        name = wanted.stem + suffix
        if not (folder / name).is_file():
            return f"{name} is missing"
        if entry["files"].get(name) != digest((folder / name).read_bytes()):
            return f"{name} was edited"
    return None


def left_over(cluster: Cluster, known: Mapping[str, Entry]) -> list[str]:
    """Files of earlier builds that the cluster no longer wants, as far as nobody edited them since."""
    keep = {wanted.stem + suffix for wanted in cluster.wanted for suffix in cluster.suffixes}
    found = []
    for entry in known.values():
        for name, content in sorted(entry["files"].items()):
            path = cluster.output / name
            # A manifest that someone doctored must not make us delete files elsewhere.
            inside = Path(name).name == name
            if name not in keep and inside and path.is_file() and digest(path.read_bytes()) == content:
                found.append(name)
    return found
