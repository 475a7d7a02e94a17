"""MSCCL XML in and out: the text form of a `Program`.

The dialect is what the MSCCL loaders read (RCCL's src/misc/msccl/msccl_parser.cc, MSCCL's src/graph/topo.cc)
and msccl-tools writes; docs/programs.md lists every element and attribute. Files are untrusted: no DTD, no
entities, no network, and every count is bounded before anything of its size is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lxml import etree

from taccl.errors import Diagnostic, InvalidInput
from taccl.synth.collective import COMBINING, NAMES, ROOTED
from taccl.synth.program import PROTOCOLS, STEP_KINDS, Program, RankProgram, Step, Threadblock

MAX_FILE_BYTES = 128 << 20
MAX_ELEMENTS = 4 << 20
MAX_RANKS = 4096
MAX_BUFFER_CHUNKS = 1 << 20  # of one buffer of one rank
MAX_TOTAL_CHUNKS = 1 << 23  # of all buffers of all ranks, and of ranks times nchunksperloop
MAX_DIAGNOSTICS = 100

COLLECTIVES = (*NAMES, "send", "recv")  # MSCCL names the last two; they need a collective from the caller
BUFFERS = ("i", "o", "s")
REDUCE_OPS = ("sum", "prod", "min", "max", "avg", "nop")  # msccl-tools writes redop="nop" for copies

_INT = re.compile(r"[+-]?[0-9]{1,18}")
_PROLOG = re.compile(r"<!--.*?-->|<\?.*?\?>", re.DOTALL)  # either may hold what looks like the other
_MARKUP = re.compile(r"<!--.*?-->|<!\[CDATA\[.*?\]\]>|<\?.*?\?>|<(?![!?/])", re.DOTALL)
_DOCTYPE = re.compile(r"<!(DOCTYPE|ENTITY)", re.IGNORECASE)


def read_xml(text: str | bytes, file: str = "<input>") -> Program:
    """The program in an MSCCL XML text.

    Comments, a prolog, any order of attributes and missing optional attributes (minBytes, maxBytes, inplace,
    outofplace, redop, root, depid, deps, hasdep, the operands of a nop) are accepted, as loaders do.
    Raises InvalidInput with every problem of the file and its line; codes X001..X031.
    """
    decoded = _decode(text, file)
    if len(decoded) > MAX_FILE_BYTES or decoded.count("<") > MAX_ELEMENTS:
        raise InvalidInput([Diagnostic(
            file, 0, 0, "X002",
            f"the file is larger than {MAX_FILE_BYTES >> 20} MiB or {MAX_ELEMENTS} elements",
            help="split the program into smaller collectives",
        )])  # fmt: skip
    doctype = _DOCTYPE.search(_PROLOG.sub(lambda match: "\n" * match.group().count("\n"), decoded))
    if doctype is not None:
        raise InvalidInput([Diagnostic(
            file, 0, 0, "X003", "a document type or entity declaration is not accepted",
            help="remove the <!DOCTYPE ...> declaration; MSCCL files need none",
        )])  # fmt: skip
    parser = etree.XMLParser(
        encoding="utf-8", resolve_entities=False, no_network=True, load_dtd=False, dtd_validation=False,
        huge_tree=False, recover=False, remove_comments=True, remove_pis=True,
    )  # fmt: skip
    try:
        root = etree.fromstring(decoded.encode(), parser)
    except etree.XMLSyntaxError as error:
        line, column = error.position
        reason = str(error.msg).split(", line ")[0]
        raise InvalidInput(
            [
                Diagnostic(
                    file, max(0, line or 0), max(0, column or 0), "X001", f"not well-formed XML: {reason}"
                )
            ]
        ) from None
    reader = _Reader(file, _lines(decoded, root))
    program = reader.program(root)
    if reader.problems or program is None:
        raise InvalidInput(sorted(reader.problems, key=lambda d: d.line))
    return program


def write_xml(program: Program) -> str:
    """The canonical text: no prolog, no tabs, double quotes, every attribute present, ranks in order.

    `read_xml(write_xml(p))` equals p but for the lines of its steps.
    Raises ValueError for a name that XML cannot hold.
    """
    p = program
    extra = [("redop", p.reduce_op)] if p.collective in COMBINING or p.reduce_op != "sum" else []
    if p.collective in ROOTED or p.root:
        extra.append(("root", str(p.root)))
    attributes = [
        ("name", _escape(p.name)), ("proto", p.protocol), ("nchannels", p.channels),
        ("nchunksperloop", p.chunks_per_loop), ("ngpus", p.ranks), ("coll", p.collective),
        ("inplace", int(p.inplace)), ("outofplace", int(p.outofplace)), ("minBytes", p.min_bytes),
        ("maxBytes", p.max_bytes), *extra,
    ]  # fmt: skip
    lines = ["<algo " + " ".join(f'{key}="{value}"' for key, value in attributes) + ">"]
    for gpu in sorted(p.gpus, key=lambda gpu: gpu.rank):
        lines.append(
            f'  <gpu id="{gpu.rank}" i_chunks="{gpu.input_chunks}" o_chunks="{gpu.output_chunks}"'
            f' s_chunks="{gpu.scratch_chunks}">'
        )
        for tb in gpu.threadblocks:
            lines.append(f'    <tb id="{tb.id}" send="{tb.send}" recv="{tb.recv}" chan="{tb.channel}">')
            for number, step in enumerate(tb.steps):
                depid, deps = step.depends if step.depends is not None else (-1, -1)
                lines.append(
                    f'      <step s="{number}" type="{step.kind}" srcbuf="{step.src_buffer}"'
                    f' srcoff="{step.src_offset}" dstbuf="{step.dst_buffer}" dstoff="{step.dst_offset}"'
                    f' cnt="{step.count}" depid="{depid}" deps="{deps}" hasdep="{int(step.has_dependents)}"/>'
                )
            lines.append("    </tb>")
        lines.append("  </gpu>")
    lines.append("</algo>\n")
    return "\n".join(lines)


def _escape(name: str) -> str:
    if any((ord(char) < 32 and char not in "\t\n\r") or char in "\ufffe\uffff" for char in name) or re.search(
        "[\ud800-\udfff]", name
    ):
        raise ValueError(f"the program's name {name!r} holds characters that XML cannot hold")
    for char, entity in (
        ("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"),
        ("\t", "&#9;"), ("\n", "&#10;"), ("\r", "&#13;"),
    ):  # fmt: skip
        name = name.replace(char, entity)
    return name


def _decode(text: str | bytes, file: str) -> str:
    if isinstance(text, bytes):
        if len(text) > MAX_FILE_BYTES:
            raise InvalidInput(
                [Diagnostic(file, 0, 0, "X002", f"the file is larger than {MAX_FILE_BYTES >> 20} MiB")]
            )
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            raise InvalidInput([Diagnostic(file, line, 0, "X001", "the file is not UTF-8 text")]) from None
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput([Diagnostic(file, 0, 0, "X001", "the text holds lone surrogates")]) from None
    # An encoding declared in the prolog is void now that the text is decoded.
    return re.sub(r"\A\s*<\?xml[^>]*\?>", lambda match: "\n" * match.group().count("\n"), text)


class _Reader:
    """Walks the tree once, collects problems, and gives neutral values so that the walk can go on."""

    def __init__(self, file: str, lines: dict[etree._Element, int]) -> None:
        self.file = file
        self.lines = lines
        self.problems: list[Diagnostic] = []
        self.total_chunks = 0

    def problem(self, element: etree._Element, code: str, message: str, help: str = "") -> None:
        if len(self.problems) < MAX_DIAGNOSTICS:
            self.problems.append(Diagnostic(self.file, self.lines[element], 0, code, message, help=help))
        elif len(self.problems) == MAX_DIAGNOSTICS:
            self.problems.append(
                Diagnostic(
                    self.file, 1 << 30, 0, "X004", f"more than {MAX_DIAGNOSTICS} problems, stopped here"
                )
            )

    def text(self, element: etree._Element, name: str, default: str | None = None) -> str:
        value = element.get(name)
        if value is None:
            if default is None:
                self.problem(element, "X010", f"<{element.tag}> lacks the attribute {name}")
                return ""
            return default
        return value

    def integer(
        self, element: etree._Element, name: str, low: int, high: int, default: int | None = None
    ) -> int:
        value = element.get(name)
        neutral = default if default is not None else low
        if value is None:
            if default is None:
                self.problem(element, "X010", f"<{element.tag}> lacks the attribute {name}")
            return neutral
        if not _INT.fullmatch(value.strip()):
            self.problem(element, "X011", f"{name}={_quote(value)} must be a whole number")
            return neutral
        number = int(value)
        if not low <= number <= high:
            self.problem(element, "X012", f"{name}={number} must lie between {low} and {high}")
            return neutral
        return number

    def choice(
        self, element: etree._Element, name: str, allowed: Sequence[str], default: str | None = None
    ) -> str:
        value = self.text(element, name, default)
        if value not in allowed:
            if element.get(name) is not None:
                self.problem(
                    element, "X013", f"{name}={_quote(value)} is unknown", help=f"known: {', '.join(allowed)}"
                )
            return allowed[0]
        return value

    def children(self, element: etree._Element, tag: str) -> list[etree._Element]:
        found = []
        for child in element:
            if child.tag == tag:
                found.append(child)
            else:
                self.problem(
                    child, "X014", f"<{element.tag}> may only hold <{tag}>, not <{_quote(str(child.tag))}>"
                )
        if (element.text or "").strip():
            self.problem(element, "X014", f"<{element.tag}> may not hold text")
        return found

    def program(self, root: etree._Element) -> Program | None:
        if root.tag != "algo":
            self.problem(root, "X005", f"the outermost element must be <algo>, not <{_quote(str(root.tag))}>")
            return None
        elements = self.children(root, "gpu")
        before = len(self.problems)
        ranks = self.integer(root, "ngpus", 1, MAX_RANKS)
        known = len(self.problems) == before
        if not known:
            ranks = min(max(1, len(elements)), MAX_RANKS)  # that many were meant
        chunks = self.integer(root, "nchunksperloop", 1, MAX_BUFFER_CHUNKS)
        if ranks * chunks > MAX_TOTAL_CHUNKS:
            self.problem(
                root, "X006", f"ngpus times nchunksperloop is {ranks * chunks}, above {MAX_TOTAL_CHUNKS}"
            )
        if known and len(elements) != ranks:
            self.problem(root, "X020", f"ngpus={ranks} but the file holds {len(elements)} <gpu> elements")
        inplace = self.integer(root, "inplace", 0, 1, 0) == 1
        gpus: dict[int, RankProgram] = {}
        for element in elements:
            gpu = self.gpu(element, ranks)
            if gpu.rank in gpus:
                self.problem(element, "X021", f"the gpu id {gpu.rank} stands twice")
            gpus[gpu.rank] = gpu
        return Program(
            name=self.text(root, "name", ""),
            collective=self.choice(root, "coll", COLLECTIVES),
            protocol=self.choice(root, "proto", PROTOCOLS),
            channels=self.integer(root, "nchannels", 1, 1 << 15),
            chunks_per_loop=chunks,
            ranks=ranks,
            inplace=inplace,
            # Writers that know no outofplace mean "in place only" by inplace="1" (msccl-tools).
            outofplace=self.integer(root, "outofplace", 0, 1, int(not inplace)) == 1,
            min_bytes=self.integer(root, "minBytes", 0, (1 << 59) - 1, 0),
            max_bytes=self.integer(root, "maxBytes", 0, (1 << 59) - 1, 0),
            gpus=tuple(gpus[rank] for rank in sorted(gpus)),
            reduce_op=self.choice(root, "redop", REDUCE_OPS, "sum"),
            root=self.integer(root, "root", 0, ranks - 1, 0),
        )

    def gpu(self, element: etree._Element, ranks: int) -> RankProgram:
        lengths = [self.integer(element, name, 0, MAX_BUFFER_CHUNKS) for name in
                   ("i_chunks", "o_chunks", "s_chunks")]  # fmt: skip
        before = self.total_chunks
        self.total_chunks += sum(lengths)
        if before <= MAX_TOTAL_CHUNKS < self.total_chunks:
            self.problem(
                element, "X006", f"the buffers of all ranks hold more than {MAX_TOTAL_CHUNKS} chunks"
            )
        threadblocks: dict[int, Threadblock] = {}
        for child in self.children(element, "tb"):
            tb = self.threadblock(child)
            if tb.id in threadblocks:
                self.problem(child, "X022", f"the threadblock id {tb.id} stands twice on one gpu")
            threadblocks[tb.id] = tb
        return RankProgram(
            self.integer(element, "id", 0, ranks - 1), lengths[0], lengths[1], lengths[2],
            tuple(threadblocks[id] for id in sorted(threadblocks)),
        )  # fmt: skip

    def threadblock(self, element: etree._Element) -> Threadblock:
        steps = []
        for number, child in enumerate(self.children(element, "step")):
            # Dependencies name steps by their number, loaders run them in file order: both must agree.
            if self.integer(child, "s", 0, MAX_ELEMENTS, number) != number:
                self.problem(
                    child,
                    "X023",
                    f"s={_quote(child.get('s') or '')} but it is step {number} of its threadblock",
                )
            steps.append(self.step(child))
        return Threadblock(
            self.integer(element, "id", 0, (1 << 15) - 1),
            self.integer(element, "send", -1, MAX_RANKS - 1),
            self.integer(element, "recv", -1, MAX_RANKS - 1),
            self.integer(element, "chan", 0, (1 << 15) - 1),
            tuple(steps),
        )

    def step(self, element: etree._Element) -> Step:
        kind = self.choice(element, "type", STEP_KINDS)
        is_nop = kind == "nop"
        buffers = [
            self.choice(element, name, BUFFERS, default if is_nop else None)
            for name, default in (("srcbuf", "i"), ("dstbuf", "o"))
        ]
        offsets = [
            self.integer(element, name, -1 if is_nop else 0, MAX_BUFFER_CHUNKS, -1 if is_nop else None)
            for name in ("srcoff", "dstoff")
        ]
        count = self.integer(element, "cnt", 0 if is_nop else 1, MAX_BUFFER_CHUNKS, 0 if is_nop else None)
        depid = self.integer(element, "depid", -1, (1 << 15) - 1, -1)
        deps = self.integer(element, "deps", -1, MAX_ELEMENTS, -1)
        if depid >= 0 and deps < 0:
            self.problem(
                element, "X024", f"depid={depid} needs deps, the step of that threadblock to wait for"
            )
        return Step(
            kind, buffers[0], offsets[0], buffers[1], offsets[1], count,
            (depid, deps) if depid >= 0 and deps >= 0 else None,
            self.integer(element, "hasdep", 0, 1, 0) == 1,
            self.lines[element],
        )  # fmt: skip


def _lines(text: str, root: etree._Element) -> dict[etree._Element, int]:
    """The line on which each element's tag starts; libxml2's own numbers are right up to 65535 only."""
    starts = [match.start() for match in _MARKUP.finditer(text) if match.end() - match.start() == 1]
    lines = {}
    line, counted = 1, 0
    for element, start in zip(root.iter(), starts, strict=True):
        line += text.count("\n", counted, start)
        counted = start
        lines[element] = line
    return lines


def _quote(value: str) -> str:
    """A value from the file for a message: short, printable."""
    shown = value if len(value) <= 40 else value[:37] + "..."
    return ascii(shown)
