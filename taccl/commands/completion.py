"""What shells offer after an option: names of bundled profiles and sketches, and files."""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The shell's own completion of paths."""
    return [CompletionItem(incomplete, type="file")]


def folders(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The shell's own completion of directories."""
    return [CompletionItem(incomplete, type="dir")]


def topologies(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Bundled profiles that begin so, else files."""
    from taccl.profiles.load import library_names

    return _names(library_names(), incomplete) or files(ctx, param, incomplete)


def sketches(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Bundled sketches that begin so, else files."""
    from taccl.sketches.load import sketch_names

    return _names(sketch_names(), incomplete) or files(ctx, param, incomplete)


def _names(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
