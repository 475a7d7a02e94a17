"""The command line `taccl`: one front door, commands loaded only when they are used.

Errors are turned into messages and exit codes here and nowhere else (see EXIT_CODES). Completion:
`eval "$(_TACCL_COMPLETE=bash_source taccl)"` (zsh_source, fish_source for the other shells).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
from typing import Any

import click

from taccl import __version__, streams
from taccl.entry import just_interrupted, speaks
from taccl.errors import NO_ROOM, TacclError

# Command -> (module in taccl.commands, one line of help). The help stands here so that `taccl --help` imports
# no command; a test compares it with the commands' own.
COMMANDS = {
    "profile": ("profile", "Measure the links between ranks: latency, bandwidth, and what they share."),
    "import": ("import_", "Turn another tool's description of a machine into a profile."),
    "library": ("library", "List the bundled profiles."),
    "sketch": ("sketch", "Check a sketch, or suggest one for a topology."),
    "schema": ("schema", "Print the JSON Schema of an input format, for editors."),
    "synth": ("synth", "Synthesise an algorithm for a collective on a topology."),
    "build": ("build", "Synthesise all algorithms of a cluster, only what is stale."),
    "verify": ("verify", "Prove that a program does what its collective promises."),
    "simulate": ("simulate", "Price a program on a topology by discrete events."),
    "explain": ("explain", "Say what bounds an algorithm's time, and what would help."),
    "convert": ("convert", "Write an algorithm or a program in another format."),
    "run": ("run", "Execute a program on real ranks and check every result (under mpiexec)."),
    "choose": ("choose", "Time several programs on real ranks and keep the quickest (under mpiexec)."),
    "bench": ("bench", "Measure what codecs would gain on your data, on one core."),
    "demo": ("demo", "Measure this machine, synthesise for it, prove, run, report."),
    "doctor": ("doctor", "Say what works on this machine, and how to get what does not."),
}

EXIT_CODES = {
    0: "the command did what was asked",
    1: "a check failed: a program is wrong, data differ, a file is stale",
    2: "usage: unknown command or option, or options that do not go together",
    3: "an input file that cannot be accepted",
    4: "infeasible: no algorithm obeys the sketch, or none of the engine that is asked for does this here",
    5: "no solution within the time limit",
    6: "the environment lacks something: MPI, a GPU, a library, disk space, a right",
    70: "a bug in taccl; TACCL_DEBUG=1 prints the traceback",
    86: "a job was ended: a rank stalled, failed, left, or runs another program",
    130: "interrupted; the best algorithm found so far was kept when there was one",
    141: "the reader of the output went away",
}

# Of Python and of the dynamic linker, where there is no memory for a thread or a library.
NO_MEMORY = ("can't start new thread", "failed to map segment from shared object", "cannot allocate memory")
INPUT_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP})


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is looked up."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands in the order of the pipeline."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now; None when there is none of that name."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As in click, with a suggestion from the lazy commands for a name that does not exist."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            import difflib

            close = difflib.get_close_matches(name, COMMANDS, n=3)
            hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Names of commands and options, without importing a command."""
        from click.shell_completion import CompletionItem

        names = [name for name in COMMANDS if name.startswith(incomplete)]
        return [CompletionItem(name, help=COMMANDS[name][1]) for name in names] + [
            item for item in click.Command.shell_complete(self, ctx, incomplete) if item.value not in COMMANDS
        ]

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """As in click; --help and --version print here, before any command runs."""
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise misused(error) from error
        except KeyboardInterrupt:
            raise interrupted() from None
        except OSError as error:
            raise click.exceptions.Exit(report(error)) from error

    def invoke(self, ctx: click.Context) -> None:
        """Run the command; every error becomes a message on stderr and an exit code."""
        try:
            super().invoke(ctx)
        except click.UsageError as error:
            raise misused(error) from error
        except (click.exceptions.Exit, click.exceptions.ClickException):
            raise
        except KeyboardInterrupt:
            raise interrupted() from None
        except Exception as error:
            in_its_place = just_interrupted() and not isinstance(error, TacclError)
            # The cause, in a class statement before Python 3.12.
            if in_its_place or isinstance(error.__cause__, KeyboardInterrupt):
                raise interrupted() from None
            raise click.exceptions.Exit(report(error)) from error


def load_command(name: str) -> click.Command:
    """Import one command of COMMANDS."""
    import importlib

    module = importlib.import_module(f"taccl.commands.{COMMANDS[name][0]}")
    command = module.command
    assert isinstance(command, click.Command)
    command.name = name
    return command


def misused(error: click.UsageError) -> click.exceptions.ClickException | click.exceptions.Exit:
    """What ends a command whose line click does not accept, once that is said: by one rank, where a launcher has
    started several with the same line."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error
    if speaks():
        path = error.ctx.command_path if error.ctx is not None else "taccl"
        say(f"{error.format_message()}\nTry '{path} --help' for help.")
    return click.exceptions.Exit(error.exit_code)


def interrupted() -> click.exceptions.Exit:
    """What ends a command after Ctrl-C, once that is said."""
    if speaks():
        say("interrupted", colour="yellow")
    return click.exceptions.Exit(130)


def report(error: Exception) -> int:
    """Print what went wrong, in one message, and return the exit code."""
    if os.environ.get("TACCL_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, TacclError):
        say(str(error))
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        return 141
    if isinstance(error, OSError) and error.errno is not None:
        say(f"{_place(error)}{error.strerror or error}")
        return 3 if error.errno in INPUT_ERRNOS else 6
    if isinstance(error, ModuleNotFoundError) and not (error.name or "taccl").startswith("taccl"):
        say(
            f"the Python package that provides {error.name!r} is missing; install taccl with its dependencies"
        )
        return 6
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        where = "the limit of address space (ulimit -v) leaves" if limited else "the machine has"
        say(f"{where} not enough memory for this; ask for fewer ranks, chunks or workers")
        return 6
    say(f"internal error: {type(error).__name__}: {error}")
    say("this is a bug in taccl; TACCL_DEBUG=1 prints the traceback to send along", colour="yellow")
    return 70


def _place(error: OSError) -> str:
    """Where it happened, as the beginning of a message."""
    if isinstance(error.filename, str | bytes):
        return f"{os.fsdecode(error.filename)}: "
    try:
        os.getcwd()
    except OSError:
        return "the working directory: "
    return "an output: " if error.errno in NO_ROOM else ""


def say(message: str, colour: str = "red") -> None:
    """One message on stderr; colour only on a terminal that wants it."""
    plain = not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    prefix = "taccl:" if plain else click.style("taccl:", fg=colour, bold=True)
    # A terminal that is gone cannot be told so.
    with contextlib.suppress(OSError):
        click.echo(f"{prefix} {message}", err=True, color=not plain)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Results go to stdout, progress and messages to stderr. Exit codes: 0 ok, 1 a check failed, "
    "2 usage, 3 bad input file, 4 infeasible, 5 no solution in time, 6 environment, 70 a fault of taccl, "
    "86 job ended, 130 interrupted, 141 the reader of the output has left.",
)
@click.version_option(__version__, prog_name="taccl")
def cli() -> None:
    """Synthesise, prove, price and run collective algorithms for the links a cluster really has."""


def main() -> None:
    """Entry point: run the command line and make sure that all output has really left."""
    streams.make_usable()
    code: str | int | None = 0
    try:
        code = cli.main(prog_name="taccl", standalone_mode=False)
    except SystemExit as leaving:
        code = leaving.code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):  # between the parts of `cli`, or while it answers an earlier one
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = interrupted().exit_code
    try:
        sys.stdout.flush()
    except OSError as error:
        code = code or report(error)
        # What is left in the buffer cannot be written; do not let the interpreter try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
