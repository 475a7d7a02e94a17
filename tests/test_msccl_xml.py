"""MSCCL XML: what is written is read back, what loaders accept is accepted, the rest is refused with its line."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_programs import GENERATED, allpairs_allreduce, every_place, relay_allgather, without_lines

from taccl.errors import InvalidInput
from taccl.synth.msccl_xml import MAX_DIAGNOSTICS, read_xml, write_xml
from taccl.synth.program import PROTOCOLS, STEP_KINDS, Program, RankProgram, Step, Threadblock

PRODUCTION_FILES = sorted((Path(__file__).resolve().parents[2] / "shared" / "msccl-xml").glob("*/*.xml"))
GOOD = write_xml(relay_allgather(3))


def refused(text):
    with pytest.raises(InvalidInput) as caught:
        read_xml(text, "bad.xml")
    assert all(d.file == "bad.xml" and d.message for d in caught.value.diagnostics)
    return caught.value.diagnostics


def codes(text):
    return [d.code for d in refused(text)]


@pytest.mark.parametrize("name", GENERATED)
def test_written_programs_are_read_back(name):
    program = GENERATED[name]
    text = write_xml(program)
    assert without_lines(read_xml(text)) == program
    assert write_xml(read_xml(text)) == text
    assert not text.startswith("<?xml") and "\t" not in text and "'" not in text


@pytest.mark.parametrize("ngpus", ["-4", "0", "three", "1000000"])
def test_a_bad_number_of_ranks_is_one_problem(ngpus):
    assert len(codes(GOOD.replace('ngpus="3"', f'ngpus="{ngpus}"'))) == 1
    assert codes(GOOD.replace(' ngpus="3"', "")) == ["X010"]


@pytest.mark.skipif(not PRODUCTION_FILES, reason="the production files are not part of the repository")
@pytest.mark.parametrize("path", PRODUCTION_FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_production_files_round_trip(path):
    program = read_xml(path.read_bytes(), str(path))
    assert without_lines(read_xml(write_xml(program))) == without_lines(program)
    lines = path.read_text().splitlines()
    for rank, tb, number in list(every_place(program))[::97]:
        step = program.gpus[rank].threadblocks[tb].steps[number]
        assert f'<step s="{number}" type="{step.kind}"' in lines[step.line - 1]


steps = st.builds(
    Step,
    st.sampled_from([kind for kind in STEP_KINDS if kind != "nop"]),
    st.sampled_from("ios"), st.integers(0, 2**15), st.sampled_from("ios"), st.integers(0, 2**15),
    st.integers(1, 71), st.none() | st.tuples(st.integers(0, 127), st.integers(0, 255)), st.booleans(),
)  # fmt: skip
nops = st.builds(
    Step, st.just("nop"), st.just("i"), st.just(-1), st.just("o"), st.just(-1), st.just(0),
    st.none() | st.tuples(st.integers(0, 127), st.integers(0, 255)), st.booleans(),
)  # fmt: skip


@st.composite
def programs(draw):
    ranks = draw(st.integers(1, 3))
    gpus = tuple(
        RankProgram(
            rank, draw(st.integers(0, 99)), draw(st.integers(0, 99)), draw(st.integers(0, 99)),
            tuple(
                Threadblock(
                    id, draw(st.integers(-1, 9)), draw(st.integers(-1, 9)), draw(st.integers(0, 31)),
                    tuple(draw(st.lists(steps | nops, max_size=3))),
                )
                for id in range(draw(st.integers(0, 2)))
            ),
        )
        for rank in range(ranks)
    )  # fmt: skip
    name = draw(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20))
    name = name.replace("\ufffe", "").replace("\uffff", "") + draw(
        st.sampled_from(["", "\t", "\n", "\r", "&<>\"'"])
    )
    return Program(
        name, draw(st.sampled_from(["allgather", "reduce", "alltoallv", "custom"])),
        draw(st.sampled_from(PROTOCOLS)), draw(st.integers(1, 32)), draw(st.integers(1, 512)), ranks,
        draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 2**40)), draw(st.integers(0, 2**40)), gpus,
        draw(st.sampled_from(["sum", "max"])), draw(st.integers(0, ranks - 1)),
    )  # fmt: skip


@settings(deadline=None, max_examples=100)
@given(programs())
def test_any_program_round_trips(program):
    text = write_xml(program)
    assert without_lines(read_xml(text)) == program
    assert without_lines(read_xml(text.encode())) == program


@pytest.mark.parametrize("name", ["\x00", "\ud800", "a\x1fb", "\uffff"])
def test_names_that_xml_cannot_hold_are_not_written(name):
    with pytest.raises(ValueError, match="cannot hold"):
        write_xml(replace(relay_allgather(3), name=name))


def test_what_loaders_tolerate():
    text = GOOD.replace(' minBytes="0" maxBytes="1073741824"', "").replace(' inplace="0" outofplace="1"', "")
    text = text.replace(' depid="-1" deps="-1"', "").replace(' hasdep="0"', "")
    text = '<?xml version="1.0" encoding="latin-1"?>\n<!-- a comment -->\n' + text.replace(
        "<gpu", "<!-- c --><gpu"
    )
    text = text.replace('<tb id="0" send="-1"', "<tb  send='-1'\n id=\"0\"")
    program = read_xml("\ufeff".encode() + text.encode())
    expected = replace(relay_allgather(3), max_bytes=0)
    assert without_lines(program) == expected
    assert (
        read_xml(GOOD.replace('outofplace="1"', "").replace('inplace="0"', 'inplace="1"')).outofplace is False
    )


def test_order_in_the_file_does_not_matter():
    lines = GOOD.splitlines(keepends=True)
    starts = [x for x, line in enumerate(lines) if "<gpu" in line] + [len(lines) - 1]
    gpus = [lines[a:b] for a, b in pairwise(starts)]
    turned = "".join([lines[0], *(line for gpu in gpus[::-1] for line in gpu), lines[-1]])
    assert turned != GOOD
    assert without_lines(read_xml(turned)) == without_lines(read_xml(GOOD))


def test_nops_need_no_operands():
    text = write_xml(allpairs_allreduce(3))
    bare = text.replace(' srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" cnt="0"', "")
    assert bare != text
    assert without_lines(read_xml(bare)) == without_lines(read_xml(text))


BAD = {
    "not XML": ("hello", "X001"),
    "empty": ("", "X001"),
    "cut off": (GOOD[:300], "X001"),
    "not UTF-8": (GOOD.encode().replace(b"allgather", b"\xff\xfe", 1), "X001"),
    "UTF-16": (GOOD.encode("utf-16"), "X001"),
    "attribute twice": (GOOD.replace("<algo ", '<algo coll="x" '), "X001"),
    "another root": ("<system/>", "X005"),
    "no attributes": ("<algo/>", "X010"),
    "no number": (GOOD.replace('nchannels="1"', 'nchannels="one"'), "X011"),
    "a fraction": (GOOD.replace('cnt="1"', 'cnt="1.5"'), "X011"),
    "digits that are not ASCII": (GOOD.replace('cnt="1"', 'cnt="\u0661"'), "X011"),
    "underscores": (GOOD.replace('cnt="1"', 'cnt="1_0"'), "X011"),
    "negative count": (GOOD.replace('cnt="1"', 'cnt="-1"'), "X012"),
    "zero count": (GOOD.replace('cnt="1"', 'cnt="0"'), "X012"),
    "huge buffer": (GOOD.replace('o_chunks="3"', 'o_chunks="1000000000000"'), "X012"),
    "huge number": (GOOD.replace('o_chunks="3"', f'o_chunks="{10**30}"'), "X011"),
    "huge rank": (GOOD.replace('ngpus="3"', 'ngpus="1000000"'), "X012"),
    "many chunks": (GOOD.replace('nchunksperloop="3"', f'nchunksperloop="{2**20}"').replace(
        'ngpus="3"', 'ngpus="4096"'), "X006"),
    "unknown protocol": (GOOD.replace('proto="Simple"', 'proto="simple"'), "X013"),
    "unknown collective": (GOOD.replace('coll="allgather"', 'coll="allsum"'), "X013"),
    "unknown step": (GOOD.replace('type="rcs"', 'type="rsc"'), "X013"),
    "unknown buffer": (GOOD.replace('dstbuf="o"', 'dstbuf="x"'), "X013"),
    "unknown element": (GOOD.replace("</tb>", "<stpe/></tb>"), "X014"),
    "text": (GOOD.replace("  <gpu", "hello <gpu", 1), "X014"),
    "missing rank": (GOOD[: GOOD.rindex("  <gpu")] + "</algo>", "X020"),
    "rank twice": (GOOD.replace('<gpu id="1"', '<gpu id="0"'), "X021"),
    "threadblock twice": (GOOD.replace('<tb id="1"', '<tb id="0"'), "X022"),
    "step out of order": (GOOD.replace('<step s="1"', '<step s="7"'), "X023"),
    "half a dependency": (GOOD.replace('depid="0" deps="0"', 'depid="0" deps="-1"'), "X024"),
    "root too large": (GOOD.replace("<algo ", '<algo root="3" '), "X012"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_refused(what):
    text, code = BAD[what]
    assert text != GOOD
    assert code in codes(text)


def test_every_problem_of_a_file_with_its_line():
    text = GOOD.replace('coll="allgather"', 'coll="x"').replace('dstbuf="o"', 'dstbuf="x"')
    found = refused(text)
    lines = text.splitlines()
    assert len(found) == 1 + text.count('dstbuf="x"')
    assert [d.line for d in found] == sorted(d.line for d in found)
    assert all('"x"' in lines[d.line - 1] for d in found)
    assert found[0].render().startswith("bad.xml:1: error[X013]: coll='x' is unknown")


def test_problems_are_counted_up_to_a_limit():
    body = '<gpu id="0" i_chunks="1" o_chunks="1" s_chunks="0"><tb id="0" send="-1" recv="-1" chan="0">'
    head = GOOD.splitlines()[0].replace('ngpus="3"', 'ngpus="1"')
    found = refused(head + body + "<x/>" * 5000 + "</tb></gpu></algo>")
    assert len(found) == MAX_DIAGNOSTICS + 1 and found[-1].code == "X004"


def test_lines_beyond_65535_are_right():
    text = GOOD.replace("<algo", "\n" * 70_000 + "<algo", 1).replace('type="rcs"', 'type="rsc"', 1)
    [found] = refused(text)
    assert "rsc" in text.splitlines()[found.line - 1]
