"""`taccl doctor`: what works on this machine, and how to get what does not."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Say what works on this machine, and how to get what does not.

    Exit code 0 when programs can be run with host memory, 6 when not; a missing GPU or codec is no failure.
    """
    from taccl.runtime.doctor import examine, host_path_works

    checks = examine()
    works = host_path_works(checks)
    if as_json:
        document = {
            "schema": "taccl/doctor/v1",
            "host_path_works": works,
            "checks": [
                {
                    "name": check.name,
                    "ok": check.ok,
                    "needed": check.needed,
                    "detail": check.detail,
                    "advice": "" if check.ok else check.advice,
                }
                for check in checks
            ],
        }
        click.echo(json.dumps(document, indent=2))
    else:
        for check in checks:
            mark = "ok  " if check.ok else "FAIL" if check.needed else "no  "
            click.echo(f"{mark} {check.name:<16} {check.detail}")
            if not check.ok:
                click.echo(f"{'':21} -> {check.advice}")
        click.echo(
            "The host path works." if works else "The host path does not work; see the lines with FAIL."
        )
    if not works:
        ctx.exit(6)
