"""Sketches by name or by file: what `--sketch` takes.

ndv2-sk-1       a bundled sketch
mine.yaml       a sketch file (.yaml, .yml)
sk1.json        one of TACCL's
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from taccl.errors import UsageError
from taccl.profiles.plain_forms import did_you_mean
from taccl.profiles.yaml_reader import read_text
from taccl.sketches.sketch import Sketch
from taccl.sketches.sketch_file import read_sketch


def sketch_names() -> tuple[str, ...]:
    """The names of the bundled sketches, sorted."""
    files = resources.files("taccl.sketches.library").iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


def sketch_text(name: str) -> str:
    """The YAML of a bundled sketch."""
    return (resources.files("taccl.sketches.library") / f"{name}.yaml").read_text("utf-8")


def load_sketch(spec: str) -> Sketch:
    """The sketch that `spec` names: a bundled one, or a file.

    Raises UsageError for an unknown name, InvalidInput for a file that cannot be read or accepted.
    """
    names = sketch_names()
    if spec in names:
        return read_sketch(sketch_text(spec), f"{spec}.yaml")
    if spec.endswith(".json"):
        from taccl.sketches.taccl_json import read_taccl_sketch

        return read_taccl_sketch(read_text(spec), spec)
    if "/" in spec or spec.endswith((".yaml", ".yml")) or Path(spec).is_file():
        return read_sketch(read_text(spec), spec)
    hint = did_you_mean(spec, names)
    raise UsageError(
        f"there is no bundled sketch {spec!r} and no such file{'; ' + hint if hint else ''}\n"
        f"bundled sketches: {', '.join(names)}"
    )
