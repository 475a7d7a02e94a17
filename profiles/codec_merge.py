"""Codec costs into a profile that is there: all else stays as its author wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from taccl.errors import InvalidInput
from taccl.profiles.codec_cost import CodecCost
from taccl.profiles.profile_file import read_topology
from taccl.profiles.profile_writer import codec_lines, write_topology
from taccl.profiles.yaml_reader import parse


def merged(old: Sequence[CodecCost], new: Sequence[CodecCost]) -> tuple[CodecCost, ...]:
    """The old costs with the new ones in place of those of the same codec and type, in order of codec and type."""
    found = {(cost.codec, cost.dtype): cost for cost in (*old, *new)}
    return tuple(found[key] for key in sorted(found))


def with_codecs(text: str, file: str, costs: Sequence[CodecCost]) -> str:
    """The profile `text` with these costs beside its own. Raises InvalidInput for what is no profile.

    A text in which lines cannot be replaced (a mapping in braces, say) comes back link by link.
    """
    topology = read_topology(text, file)
    wanted = replace(topology, codecs=merged(topology.codecs, costs))
    made = _replaced(text, file, codec_lines(wanted.codecs))
    try:
        if read_topology(made, file) == wanted:
            return made
    except InvalidInput:
        pass
    described = [value.text for key, value in parse(text, file).entries if key.text == "description"]
    return write_topology(wanted, *described)


def _replaced(text: str, file: str, block: Sequence[str]) -> str:
    """The text with other lines of `codecs`; at its end where it has none."""
    lines = text.splitlines()
    begins = sorted((key.line - 1, key.text) for key, _ in parse(text, file).entries)
    first = next((line for line, key in begins if key == "codecs"), len(lines))
    end = min((line for line, _ in begins if line > first), default=len(lines))
    while end > first + 1 and lines[end - 1].lstrip()[:1] in ("", "#"):  # comments belong to what follows
        end -= 1
    return "\n".join([*lines[:first], *block, *lines[end:]]) + "\n"
