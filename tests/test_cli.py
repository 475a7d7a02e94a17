"""The front door: lazy commands, messages, exit codes, manners."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from taccl import __version__, cli, entry
from taccl.commands.options import Quantity, Size, write_output
from taccl.errors import (
    CheckFailed,
    EnvironmentProblem,
    Infeasible,
    Interrupted,
    InvalidInput,
    NoSolutionInTime,
    TacclError,
    UsageError,
)


def python(*arguments: str, stdout: Any = subprocess.PIPE, **added: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=os.environ | added,
        text=True,
        timeout=120,
    )


def run_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a command that raises `error`."""

    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.setattr(cli, "load_command", lambda name: failing)
    result = CliRunner().invoke(cli.cli, ["synth"])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckFailed("wrong"), 1),
        (UsageError("wrong"), 2),
        (InvalidInput("wrong"), 3),
        (Infeasible("wrong", ["rule one"]), 4),
        (NoSolutionInTime("wrong"), 5),
        (EnvironmentProblem("wrong"), 6),
        (Interrupted("wrong"), 130),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "wrong"), 3),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "wrong"), 3),
        (PermissionError(errno.EACCES, "Permission denied", "wrong"), 6),
        (OSError(errno.ENOSPC, "No space left on device: wrong"), 6),
        (ModuleNotFoundError("wrong", name="ortools"), 6),
        (MemoryError("wrong"), 6),
        (ImportError("libx.so: failed to map segment from shared object"), 6),
    ],
)
def test_errors_become_one_message_and_a_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    found, out, err = run_with(monkeypatch, error)
    assert (found, out) == (code, "")
    assert err.startswith("taccl: ") and "Traceback" not in err
    if isinstance(error, TacclError) or getattr(error, "filename", None):
        assert "wrong" in err


def test_bugs_are_called_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TACCL_DEBUG", raising=False)
    code, _, err = run_with(monkeypatch, ZeroDivisionError("boom"))
    assert code == 70 and "internal error: ZeroDivisionError: boom" in err and "Traceback" not in err
    monkeypatch.setenv("TACCL_DEBUG", "1")
    code, _, err = run_with(monkeypatch, ZeroDivisionError("boom"))
    assert code == 70 and "Traceback" in err


def test_ctrl_c_and_closed_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(monkeypatch, KeyboardInterrupt())[0] == 130
    assert run_with(monkeypatch, BrokenPipeError(errno.EPIPE, "Broken pipe")) == (141, "", "")


def test_what_a_library_makes_of_ctrl_c_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "_interrupted", time.monotonic())
    for error, code in ((TypeError("expected a message argument"), 130), (UsageError("wrong"), 2)):
        found, out, err = run_with(monkeypatch, error)
        assert (found, out) == (code, "") and "internal error" not in err
    monkeypatch.setattr(entry, "_interrupted", time.monotonic() - 2 * entry.AGAIN_S)
    assert run_with(monkeypatch, TypeError("expected a message argument"))[0] == 70


INTERRUPTED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
sys.argv = ["taccl", "library"]
from taccl.entry import main
main()
"""


@pytest.mark.parametrize(
    "name", ["taccl.cli", "click", "taccl.errors", "taccl.commands", "taccl.commands.library"]
)
def test_ctrl_c_while_loading(name: str) -> None:
    done = python("-c", INTERRUPTED.format(name=name))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "taccl: interrupted\n")


DROPPED = """
import os, signal, time
from taccl.entry import heed, interrupt
class Dropping:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(3):
            pass
heed({handler})
try:
    Dropping()
    time.sleep(20)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("handler", ["interrupt", "signal.default_int_handler"])
def test_ctrl_c_where_python_drops_it(handler: str) -> None:
    """In finalizers, and in the callbacks by which a module's import ends."""
    done = python("-c", DROPPED.format(handler=handler))
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_ctrl_c_while_reading_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(click.Group, "make_context", stop)
    monkeypatch.setattr(sys, "argv", ["taccl", "library"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 130


BETWEEN = """
import sys
from taccl import cli
def stop(*_):
    raise KeyboardInterrupt
cli.LazyGroup.invoke = stop
sys.argv = ["taccl", "library"]
cli.main()
"""


def test_ctrl_c_between_the_parts_of_the_command_line() -> None:
    """Not in click's words, and with no code of its own."""
    done = python("-c", BETWEEN)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "taccl: interrupted")


def test_unknown_command_suggests() -> None:
    result = CliRunner().invoke(cli.cli, ["synht"])
    assert result.exit_code == 2
    assert "Did you mean 'synth'?" in result.stderr


def test_every_command_loads_and_help_agrees_with_the_table() -> None:
    for name, (_, text) in cli.COMMANDS.items():
        command = cli.load_command(name)
        assert command.name == name
        assert (command.help or "").split("\n\n")[0].replace("\n", " ") == text
        result = CliRunner().invoke(cli.cli, [name, "--help"])
        assert result.exit_code == 0, result.output


def test_help_imports_no_command_and_no_heavy_package() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom taccl.cli import cli\n"
        "result = CliRunner().invoke(cli, ['--help'])\n"
        "heavy = {'ortools', 'numpy', 'mpi4py', 'networkx', 'lxml', 'yaml', 'rich'} & set(sys.modules)\n"
        "print(result.exit_code, heavy, [m for m in sys.modules if m.startswith('taccl.commands')])"
    )
    done = python("-c", code)
    assert done.stdout == "0 set() []\n"


def test_help_is_quick() -> None:
    """Below 150 ms on a quiet machine; here processor time against that of a program that only imports click."""

    def seconds(*line: str) -> float:
        taken = []
        for _ in range(5):
            before = os.times()
            subprocess.run([sys.executable, *line], stdout=subprocess.DEVNULL, check=True, timeout=60)
            after = os.times()
            taken.append(
                after.children_user + after.children_system - before.children_user - before.children_system
            )
        return min(taken)

    assert seconds("-m", "taccl", "--help") < 1.5 * seconds("-c", "import click") + 0.1


def test_version_and_python_m() -> None:
    done = python("-m", "taccl", "--version")
    assert done.returncode == 0 and done.stdout == f"taccl, version {__version__}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_on_stdout() -> None:
    with open("/dev/full", "w") as full:
        done = python("-m", "taccl", "--help", stdout=full)
    assert done.returncode == 6
    assert done.stderr == "taccl: an output: No space left on device\n"


GONE = """
import os, sys
os.chdir({gone!r})
os.rmdir({gone!r})
from taccl.cli import main
sys.argv = "taccl synth -t ring:4 -c allgather --size 1KB -o x.xml".split()
main()
"""


def test_a_working_directory_that_has_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = python("-c", GONE.format(gone=str(tmp_path / "gone")))
    said = "taccl: the working directory: No such file or directory\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, "", said)


def test_reader_that_goes_away() -> None:
    read, write = os.pipe()
    os.close(read)
    done = python("-m", "taccl", "--help", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def closed(streams: str, *line: str) -> subprocess.CompletedProcess[str]:
    """`taccl line` with the standard streams of these numbers closed, as `2>&-` does."""
    script = 'for n in $0; do eval "exec $n>&-"; done; exec "$@"'
    return subprocess.run(
        ["sh", "-c", script, streams, sys.executable, "-m", "taccl", *line],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("streams", ["1", "2", "0 1 2"])
def test_closed_streams_change_no_exit_code(streams: str, tmp_path: Path) -> None:
    file = tmp_path / "x.xml"
    ring = ("synth", "-t", "ring:4", "-c", "allgather", "--size", "1KB", "--engine", "ring", "-o")
    none = str(tmp_path / "none")
    for code, line in [
        (0, ["--version"]),
        (0, ["library"]),
        (3, ["verify", none]),
        (0, [*ring, str(file)]),
        (2, ["x"]),
    ]:
        done = closed(streams, *line)
        assert done.returncode == code, (line, done.stderr)
        assert "Traceback" not in done.stderr and "Error" not in done.stdout
    assert file.read_text().startswith("<algo ")  # and nothing that was meant for a stream
    if "1" in streams:  # where the product itself is lost
        done = closed(streams, *ring, "-")
        assert done.returncode == 6
        assert "2" in streams or done.stderr.splitlines()[-1].endswith("standard output, which is closed")


FOREIGN = """\
schema: taccl/profile/v1
name: "日本é"
node: {ranks: 2, links: [{class: wire, pairs: [[0, 1]], both_ways: true}]}
classes: {wire: {alpha: 1us, beta: 10GB/s}}
"""


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-8"])
def test_any_text_in_any_encoding(encoding: str, tmp_path: Path) -> None:
    """What people read is escaped where it must be, files are UTF-8."""
    (tmp_path / "own.yaml").write_text(FOREIGN, "utf-8")
    xml, native, page = (str(tmp_path / f"own.{suffix}") for suffix in ("xml", "json", "html"))
    synth = (
        "synth",
        "-t",
        str(tmp_path / "own.yaml"),
        "-c",
        "allgather",
        "--size",
        "1KB",
        "--engine",
        "ring",
        "-o",
    )

    def run(*line: str) -> bytes:
        given = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run(
            [sys.executable, "-m", "taccl", *line], capture_output=True, env=given, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    name = "日本é".encode(encoding, "backslashreplace")
    assert name in run(*synth, xml)
    run(*synth, native)
    assert run(*synth, "-") == Path(xml).read_bytes()
    run("convert", native, "--to", "html", "-o", page)
    written = Path(page).read_bytes()
    assert "日本é".encode() in written and run("convert", native, "--to", "html") == written


def test_names_of_files_may_be_no_text(tmp_path: Path) -> None:
    none = os.fsencode(tmp_path) + b"/\xff.xml"
    done = subprocess.run([sys.executable, "-m", "taccl", "verify", none], capture_output=True, timeout=120)
    assert done.returncode == 3 and b"\\udcff.xml: No such file or directory" in done.stderr


def test_completion_offers_commands() -> None:
    asked = {"_TACCL_COMPLETE": "bash_complete", "COMP_WORDS": "taccl sy", "COMP_CWORD": "1"}
    done = python("-c", "from taccl.cli import main; main()", **asked)
    assert done.stdout.splitlines() == ["plain,synth"]


def test_colour_only_on_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    cli.say("plain")
    assert capsys.readouterr().err == "taccl: plain\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    cli.say("coloured")
    assert capsys.readouterr().err == "\x1b[31m\x1b[1mtaccl:\x1b[0m coloured\n"
    monkeypatch.setenv("NO_COLOR", "1")
    cli.say("plain")
    assert capsys.readouterr().err == "taccl: plain\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [("1MB", 10**6), ("1MiB", 2**20), ("64", 64), ("1.5KB", 1500), ("1e3", 1000), ("2GiB", 2**31)],
)
def test_sizes(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize(
    "text", ["0", "-1", "1.5", "1/3", "1 apple", "", "nan", "1e300", "9999PB", "1" * 500]
)
def test_bad_sizes(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Size().convert(text, None, None)


def test_quantities() -> None:
    assert Quantity("s", 0, 3600).convert("5min", None, None) == 300.0
    assert Quantity("fraction", 0, 1).convert("5%", None, None) == 0.05
    with pytest.raises(click.BadParameter, match="from 0 to 1"):
        Quantity("fraction", 0, 1).convert("150%", None, None)


def options_with_numbers() -> list[Any]:
    """(command, option) of every option whose value may have a fraction, subcommands too."""
    found = []
    commands = [(name, cli.load_command(name)) for name in cli.COMMANDS]
    while commands:
        name, made = commands.pop(0)
        if isinstance(made, click.Group):
            commands += [(f"{name} {sub}", one) for sub, one in made.commands.items()]
        numeric = (Quantity, click.types.FloatParamType)
        found += [
            pytest.param(made, p, id=f"{name}{p.opts[0]}") for p in made.params if isinstance(p.type, numeric)
        ]
    return found


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "NaN", "infinity", "1e400", "1e999"])
@pytest.mark.parametrize(("made", "option"), options_with_numbers())
def test_numbers_must_be_finite(made: click.Command, option: click.Option, text: str) -> None:
    with pytest.raises(click.BadParameter):
        option.type.convert(text, option, click.Context(made))


def test_output_is_all_or_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new" / "file.xml"
    write_output(str(target), "one")
    target.chmod(0o640)
    write_output(str(target), "two")
    assert target.read_text() == "two" and target.stat().st_mode & 0o777 == 0o640

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "broken on purpose", "a temporary file")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", fails)
        with pytest.raises(EnvironmentProblem, match="on purpose") as caught:
            write_output(str(target), "three")
    assert str(caught.value).startswith(f"{target}: ")
    assert [path.name for path in target.parent.iterdir()] == ["file.xml"] and target.read_text() == "two"
    longest = tmp_path / ("x" * 251 + ".xml")  # as long as names may be
    write_output(str(longest), "one")
    assert longest.read_text() == "one"
    write_output("-", "to stdout")
    assert capsys.readouterr().out == "to stdout"
    with pytest.raises(UsageError, match="is a directory; name a file in it"):
        write_output(str(tmp_path), "x")
    if Path("/proc/self").is_dir():  # which is no place for files, whatever one's rights
        with pytest.raises(EnvironmentProblem, match=r"^/proc/self/no/x: this cannot be written"):
            write_output("/proc/self/no/x", "x")
