"""Nodes with places, forms, quantities: what is refused, where, and that nothing else comes out."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from taccl.errors import InvalidInput
from taccl.profiles.forms import Either, Field, ListOf, MapOf, Record, Row
from taccl.profiles.plain_forms import Boolean, Integer, Number, Text
from taccl.profiles.quantity import quantity
from taccl.profiles.yaml_reader import (
    MAX_DEPTH,
    MAX_FINDINGS,
    MAX_KEYS,
    MAX_NOTED,
    Findings,
    parse,
    plain_value,
    read_text,
)

LINK = Record(
    {
        "src": Field(Integer(0, 9), "sending rank", required=True),
        "beta": Field(Number("us/MB", above=0), "time per megabyte"),
        "kind": Field(Text(choices=("nvlink", "pcie")), "class"),
        "on": Field(Boolean(), "whether it works"),
        "name": Field(Text(), "a name"),
        "ranks": Field(ListOf(Integer(0, 9), minimum=1), "ranks"),
        "rows": Field(ListOf(Row({"a": Field(Integer(), "", True), "b": Field(Text(), "")})), "rows"),
        "by_name": Field(MapOf(Integer(0, 9)), "numbers by name"),
    },
    "a link",
)


def read(text: str, form: Any = LINK) -> Any:
    node = parse(text, "f.yaml")
    value = form.read(node)
    node.findings.raise_if_any()
    return value


def findings(text: str, form: Any = LINK) -> list[tuple[str, int, int]]:
    """(code, line, column) of everything wrong with a text."""
    with pytest.raises(InvalidInput) as caught:
        read(text, form)
    return [(found.code, found.line, found.column) for found in caught.value.diagnostics]


def test_values_are_typed_and_exact() -> None:
    values = read(
        "src: 3\nbeta: 100GB/s\nkind: nvlink\non: true\nname: no\nranks: [0, 1]\n"
        "rows:\n- [1, x]\n- [2]\nby_name: {a: 1, b: 2}\n"
    )
    assert values["src"] == 3
    assert values["beta"] == Fraction(10)
    assert values["on"] is True
    assert values["name"] == "no"  # YAML 1.1 would make it false
    assert values["ranks"] == [0, 1]
    assert [(row["a"], row.get("b")) for row in values["rows"]] == [(1, "x"), (2, None)]
    assert values["by_name"] == {"a": 1, "b": 2}
    assert not values.broken
    assert (values.at("beta").line, values.at("beta").column) == (2, 7)
    assert values.at("missing") is values.node


def test_all_errors_come_in_one_run_with_their_places() -> None:
    assert findings("src: 99\nbeta: 0\nkind: nvlnk\non: no\nranks: [1, x]\nkind: pcie\n") == [
        ("Y104", 1, 6),
        ("Y104", 2, 7),
        ("Y106", 3, 7),
        ("Y105", 4, 5),
        ("Y103", 5, 12),
        ("Y015", 6, 1),
    ]


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("", "Y006", "empty"),
        ("# nothing\n", "Y006", "empty"),
        ("a: 1\n---\nb: 2\n", "Y007", "several"),
        ("\tsrc: 1\n", "Y005", "spaces"),
        ("src: [1\n", "Y005", "cannot be read"),
        ("src: 1\n src: 2\n", "Y005", "indentation"),
        ("src: \x00\n", "Y004", "U+0000"),
        ("src: \ud800\n", "Y004", "U+D800"),
        ("a: &a [*a]\n", "Y012", "endless"),
        ("a: *b\n", "Y011", "no anchor"),
        ("[" * 100_000, "Y009", "nested"),
        ("- " * 100_000, "Y009", "nested"),
        ("? [1]\n: 2\nsrc: 1\n", "Y013", "a list"),
        ("<<: {src: 1}\n", "Y014", "merge"),
        ("src: !!python/name:os.system 1\n", "Y010", "tag"),
        ('src: "\\UFFFFFFFF"\n', "Y005", "cannot be read"),
        ("src: 1\nsrc: 2\n", "Y015", "line 1"),
        ("[1]\n", "Y101", "a list"),
        ("src: 1\nscr: 2\n", "Y102", "known keys"),
        ("scr: 2\n", "Y102", "did you mean 'src'"),
        ("kind: pcie\n", "Y109", "'src' is missing"),
        ("src: '1'\n", "Y101", "the text '1'"),
        ("src:\n", "Y101", "nothing"),
        ("src: 1\nname: 5\n", "Y101", 'in quotes: "5"'),
        ("src: 1\nname: true\n", "Y101", "the boolean true"),
        ("src: 1\nname: 1e3\n", "Y101", "the number '1e3'"),
        ("src: 1\nbeta: '46'\n", "Y101", "remove the quotes"),
        ("src: 1.5\n", "Y104", "whole number"),
        ("src: 012\n", "Y103", "octal"),
        ("src: 0x1\n", "Y103", "decimal"),
        ("src: 1_0\n", "Y103", "decimal"),
        ("src: 1:30\n", "Y103", "expected a number"),
        ("src: .nan\n", "Y103", "finite"),
        ("src: -.inf\n", "Y103", "finite"),
        ("src: 1e999999999\n", "Y103", "proportion"),
        ("src: 1e-999999999\n", "Y103", "proportion"),
        ("src: " + "9" * 5000 + "\n", "Y103", "5000 characters"),
        ("src: 1\nbeta: 1/0\n", "Y103", "divides by 0"),
        ("src: 1\nbeta: 0GB/s\n", "Y103", "above 0"),
        ("src: 1\nbeta: 5us\n", "Y103", "a rate such as"),
        ("src: 1\nbeta: 5furlong\n", "Y103", "a rate such as"),
        ("src: 1\nranks: []\n", "Y108", "found 0"),
        ("src: 1\nrows: [[]]\n", "Y108", "found 0 items"),
        ("src: 1\non: OFF\n", "Y105", "write false"),
        ("src: 1\nby_name: {a b: 1}\n", "Y107", "a name"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, code: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(text)
    assert caught.value.diagnostics[0].code == code
    assert words in str(caught.value)


def test_an_alias_bomb_ends_soon() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 40)]
    assert findings("\n".join(lines))[0][:2] == ("Y008", 7)


def test_an_alias_repeats_a_value() -> None:
    values = read("src: 1\nranks: &r [1, 2]\nrows: [[1, x]]\nby_name: {a: 1}\n")
    assert values["ranks"] == [1, 2]
    assert read("- &r [1, 2]\n- *r\n", ListOf(ListOf(Integer()))) == [[1, 2], [1, 2]]


def test_the_deepest_nesting_that_is_read() -> None:
    assert parse("[" * MAX_DEPTH + "]" * MAX_DEPTH, "f").kind == "sequence"


def test_an_unknown_key_close_to_a_known_one_is_read_as_that() -> None:
    assert findings("scr: 99\n") == [("Y102", 1, 1), ("Y104", 1, 6)]


def test_many_errors_are_counted_not_listed() -> None:
    text = "src: 1\nrows:\n" + "".join(f"- [x{i}]\n" for i in range(500))
    with pytest.raises(InvalidInput) as caught:
        read(text)
    assert len(caught.value.diagnostics) == MAX_FINDINGS + 1
    assert "400 more errors" in str(caught.value)


def test_reading_stops_where_nobody_reads_on() -> None:
    bad = "src: 1\nrows:\n" + "".join(f"- [x{i}]\n" for i in range(MAX_NOTED + 5))
    with pytest.raises(InvalidInput) as caught:
        read(bad)
    assert f"at least {MAX_NOTED - MAX_FINDINGS} more errors" in str(caught.value)
    keys = "".join(f"k{i}: 1\n" for i in range(MAX_KEYS + 1))
    assert findings(keys) == [("Y008", MAX_KEYS + 1, 1)]


def test_messages_show_the_line_with_a_caret() -> None:
    with pytest.raises(InvalidInput) as caught:
        read("src: 1\nkind: nvlnk\n")
    assert str(caught.value) == (
        "f.yaml:2:7: error[Y106]: expected one of nvlink, pcie, found 'nvlnk'\n"
        "  kind: nvlnk\n"
        "        ^\n"
        "  help: did you mean 'nvlink'?"
    )


def test_long_lines_are_not_repeated_in_messages() -> None:
    with pytest.raises(InvalidInput) as caught:
        read("src: 1\nname: [" + "x" * 10_000 + "]\n")
    assert len(str(caught.value)) < 300


def test_warnings_do_not_raise() -> None:
    found = Findings("f", "text")
    found.add(1, 1, "P999", "careful", severity="warning")
    found.raise_if_any()
    assert [warning.code for warning in found.warnings] == ["P999"]
    assert not found.errors


def test_either_takes_the_first_form_that_looks_right() -> None:
    form = Either((Text(choices=("auto",)), Integer(0, 5), ListOf(Integer(0, 5))))
    assert read("auto", form) == "auto"
    assert read("3", form) == 3
    assert read("[1, 2]", form) == [1, 2]
    assert findings("{}", form) == [("Y101", 1, 1)]
    assert findings("7", form) == [("Y104", 1, 1)]


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("46", "us/MB", Fraction(46)),
        ("46us/MB", "us/MB", Fraction(46)),
        ("46 us/MB", "us/MB", Fraction(46)),
        ("1ns/KB", "us/MB", Fraction(1)),
        ("1us/MiB", "us/MB", Fraction(10**6, 2**20)),
        ("100GB/s", "us/MB", Fraction(10)),
        ("25Gbit/s", "us/MB", Fraction(320)),
        ("200Gbps", "us/MB", Fraction(40)),
        ("1GiB/s", "us/MB", Fraction(10**12, 2**30)),
        ("10/3", "us/MB", Fraction(10, 3)),
        ("1e3", "", Fraction(1000)),
        ("1.5e-2", "", Fraction(3, 200)),
        (".5", "", Fraction(1, 2)),
        ("2.6us", "us", Fraction(13, 5)),
        ("2.6µs", "us", Fraction(13, 5)),
        ("5ns", "us", Fraction(1, 200)),
        ("1ms", "us", Fraction(1000)),
        ("5min", "s", Fraction(300)),
        ("10us", "s", Fraction(1, 100_000)),
        ("1MB", "bytes", Fraction(10**6)),
        ("1MiB", "bytes", Fraction(2**20)),
        ("64KB", "bytes", Fraction(64_000)),
        ("5%", "fraction", Fraction(1, 20)),
        ("0.1", "us", Fraction(1, 10)),  # 0.1 itself, not the float next to it
    ],
)
def test_quantities(text: str, unit: str, value: Fraction) -> None:
    assert quantity(text, unit) == value


@pytest.mark.parametrize("text", ["1K", "1M", "1 G"])
def test_sizes_that_could_mean_two_things_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="powers of 1024"):
        quantity(text, "bytes")


@given(st.fractions(min_value=0, max_value=10**9, max_denominator=10**6))
@settings(deadline=None, max_examples=60)
def test_a_written_fraction_reads_as_itself(value: Fraction) -> None:
    assert quantity(str(value), "") == value


@given(st.text(max_size=60), st.sampled_from(["", "us", "s", "us/MB", "bytes", "fraction"]))
@example("1e99999999999999999999", "us")
@example("٣", "us")  # a digit, but not an ASCII one
@settings(deadline=None, max_examples=200)
def test_any_text_is_a_number_or_a_sentence(text: str, unit: str) -> None:
    try:
        assert isinstance(quantity(text, unit), Fraction)
    except ValueError as error:
        assert len(str(error)) > 10


def test_plain_values_follow_yaml_1_2() -> None:
    node = parse('{a: no, b: 012, c: 1e3, d: "5", e: ~, f: [true, 2.5], g: 1:30}', "f")
    assert plain_value(node) == {
        "a": "no", "b": 12, "c": 1000.0, "d": "5", "e": None, "f": [True, 2.5], "g": "1:30",
    }  # fmt: skip


def test_files(tmp_path: Any) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfsrc: 1\n")
    assert read(read_text(path))["src"] == 1  # a byte order mark is no part of the text
    path.write_bytes(b"src: 1\nname: \xff\n")
    with pytest.raises(InvalidInput) as caught:
        read_text(path)
    assert [(found.code, found.line, found.column) for found in caught.value.diagnostics] == [("Y003", 2, 7)]
    with pytest.raises(InvalidInput, match="larger than the 3 bytes"):
        read_text(path, limit=3)
    for bad in (tmp_path, tmp_path / "none.yaml", "a\0b"):
        with pytest.raises(InvalidInput, match="Y001"):
            read_text(bad)


STRUCTURE = st.recursive(
    st.sampled_from(["1", "x", "no", "''", "46us/MB", "1e3", "~", "-1", "nvlink", "true", "*a", "&a 1"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(
            st.tuples(st.sampled_from(["src", "beta", "kind", "on", "ranks", "rows", "a", "scr"]), inner),
            max_size=4,
        ).map(lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"),
    ),
    max_leaves=12,
)


@given(st.one_of(st.text(max_size=80), STRUCTURE))
@settings(deadline=None, max_examples=300)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        values = read(text)
    except InvalidInput as error:
        assert error.diagnostics
        assert all(found.message and found.code.startswith("Y") for found in error.diagnostics)
    else:
        assert 0 <= values["src"] <= 9
