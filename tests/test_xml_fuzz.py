"""Hostile XML: whatever the bytes, the reader gives a program or InvalidInput, quickly and in little memory."""

import random
import time
import tracemalloc

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_programs import GENERATED, allpairs_allreduce, relay_allgather

from taccl.cli import cli
from taccl.errors import CheckFailed, InvalidInput
from taccl.synth.msccl_xml import read_xml, write_xml
from taccl.synth.verify import verify

TEXTS = [write_xml(program) for program in GENERATED.values()]
VALUES = ["", "-1", "0", "1", "2", "7", "71", "72", "127", "4096", "99999999999", "-9" * 30, "1e3", "i", "s", "nop",
          "r", "allreduce", "custom", "\u00e9", "0x10", " 1 ", "&amp;", "&#1;", "&x;", "<", '"']  # fmt: skip


def read_and_judge(text):
    """None if refused by the reader, else the findings: neither may fail in another way."""
    try:
        program = read_xml(text, "fuzz.xml")
    except InvalidInput as refusal:
        assert refusal.diagnostics and str(refusal)
        return None
    findings = verify(program)
    assert all(finding.message and finding.code for finding in findings)
    return findings


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes(data):
    assert read_and_judge(data) is None


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(TEXTS), st.integers(0, 2**32))
def test_damaged_bytes(text, seed):
    rng = random.Random(seed)
    data = bytearray(text.encode())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        cut = rng.choice([
            data[at : at + 1], b"", bytes([rng.randrange(256)]), data[at : at + 40] * 2, b"<step/>", b"-", b"9",
        ])  # fmt: skip
        data[at : at + rng.choice([0, 1, 10, 400])] = cut
    read_and_judge(bytes(data))


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(TEXTS), st.integers(0, 2**32))
def test_damaged_attributes(text, seed):
    rng = random.Random(seed)
    parts = text.split('"')
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(1, len(parts), 2)
        parts[at] = rng.choice(VALUES + parts[1::2])
    read_and_judge('"'.join(parts))


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(TEXTS), st.integers(0, 2**32))
def test_damaged_lines(text, seed):
    rng = random.Random(seed)
    lines = text.splitlines(keepends=True)
    for _ in range(rng.randint(1, 3)):
        at, to = rng.randrange(len(lines)), rng.randrange(len(lines))
        rng.choice([
            lambda at=at, to=to: lines.insert(to, lines[at]),
            lambda at=at, to=to: lines.insert(to, lines.pop(at)),
            lambda at=at, to=to: lines.pop(at) if len(lines) > 1 else None,
        ])()  # fmt: skip
    read_and_judge("".join(lines))


BOMB = (
    '<!DOCTYPE algo [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY {chr(98 + x)} "{f"&{chr(97 + x)};" * 10}">' for x in range(12))
    + ']><algo name="&m;"/>'
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        BOMB.replace("<!DOCTYPE", "<!-- <!DOCTYPE --><!DOCTYPE"),
        '<!DOCTYPE algo SYSTEM "file:///etc/passwd"><algo/>',
        '<!DOCTYPE algo [<!ENTITY x SYSTEM "file:///etc/passwd">]><algo name="a">&x;</algo>',
        '<!DOCTYPE algo [<!ENTITY % p SYSTEM "http://127.0.0.1:9/x"> %p;]><algo/>',
        '<algo name="&undefined;"/>',
        '<?x <!-- ?><!DOCTYPE algo [<!ENTITY e "a">]><?y --> ?><algo name="&e;"/>',
        '<?x <!-- ?><!DOCTYPE algo [<!ENTITY e "a">]><?y --> ?><algo>&e;</algo>',
        '<!-- <?x --><!DOCTYPE algo [<!ENTITY e "a">]><!-- ?> --><algo name="&e;"/>',
        '<algo xmlns:xi="http://www.w3.org/2001/XInclude"><xi:include href="/etc/passwd" parse="text"/></algo>',
    ],
)
def test_entities_and_document_types_are_refused(text):
    with pytest.raises(InvalidInput) as refusal:
        read_xml(text)
    assert "root:" not in str(refusal.value)


def test_a_comment_may_speak_of_document_types():
    for said in ("<!-- no <!DOCTYPE here -->", "<?note no <!DOCTYPE here ?>"):
        assert read_xml(said + TEXTS[0]).ranks == read_xml(TEXTS[0]).ranks


HEAD = (
    '<algo name="x" proto="LL" nchannels="1" nchunksperloop="{chunks}" ngpus="{ranks}" coll="{coll}" inplace="0"'
    ' outofplace="1" minBytes="0" maxBytes="1">'
)


@pytest.mark.parametrize(
    "text",
    [
        "<a>" * 100_000,
        "<algo " + " ".join(f'a{x}="1"' for x in range(50_000)) + "/>",
        '<algo name="' + "x" * 20_000_000 + '"/>',
        HEAD.format(chunks=1 << 20, ranks=4096, coll="alltoall") + "</algo>",
        HEAD.format(chunks=10**12, ranks=1, coll="allreduce") + "</algo>",
        HEAD.format(chunks=1, ranks=1, coll="allreduce")
        + f'<gpu id="0" i_chunks="{10**12}" o_chunks="{10**9}" s_chunks="{10**15}"/></algo>',
        HEAD.format(chunks=1, ranks=100, coll="allreduce")
        + "".join(f'<gpu id="{r}" i_chunks="1" o_chunks="1" s_chunks="1000000"/>' for r in range(100))
        + "</algo>",
    ],
    ids=["deep", "attributes", "long value", "ranks", "loop", "buffers", "scratch"],
)
def test_huge_counts_are_refused_before_anything_is_allocated(text):
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(InvalidInput):
        read_xml(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(text) + 20_000_000
    assert time.process_time() - start < 10


def test_circles_of_dependencies_end():
    text = write_xml(allpairs_allreduce(3)).replace('depid="-1" deps="-1"', 'depid="0" deps="0"')
    found = read_and_judge(text)
    assert found and any(finding.severity == "error" for finding in found)


def test_the_command_refuses_with_its_exit_code(tmp_path):
    path = tmp_path / "bomb.xml"
    runner = CliRunner()
    for text in (BOMB, "", "<algo/>", "\x00" * 50):
        path.write_text(text)
        for command in (
            ["verify", str(path)],
            ["simulate", str(path), "--topology", "ring:4", "--size", "1MB"],
        ):
            result = runner.invoke(cli, command)
            assert result.exit_code == 3
            assert "Traceback" not in result.output and str(path) in result.output


def test_programs_of_one_rank_and_no_steps_are_judged():
    empty = (
        HEAD.format(chunks=1, ranks=1, coll="allgather")
        + '<gpu id="0" i_chunks="1" o_chunks="1" s_chunks="0"/></algo>'
    )
    assert [finding.code for finding in read_and_judge(empty)] == ["V406"]
    assert read_and_judge(write_xml(relay_allgather(3)).replace('ngpus="3"', 'ngpus="2"')) is None
    with pytest.raises(CheckFailed):
        from taccl.synth.program_collective import collective_of

        collective_of("allgather", 3, 4)
