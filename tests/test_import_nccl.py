"""NCCL topology XML: hand-made NVLink machines, real dumps of AMD machines, and what is refused."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from taccl.cli import load_command
from taccl.errors import InvalidInput, UsageError
from taccl.profiles.importers.machine import Gpu, Imported, Machine, NicDevice, Wire, _Builder
from taccl.profiles.importers.nccl_xml import read_nccl_xml
from taccl.profiles.load import load_topology
from taccl.profiles.profile_file import read_topology
from taccl.profiles.topology import Link, Topology

DUMPS = Path(__file__).resolve().parents[2] / "shared" / "nccl-topo"

CPU = '<cpu numaid="{}" affinity="ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85">'


def system(*cpus: str) -> str:
    body = "".join(f"{CPU.format(numa)}{inside}</cpu>\n" for numa, inside in enumerate(cpus))
    return f'<system version="1">\n{body}</system>\n'


def pci(
    busid: str, inside: str, kind: str = "0x030200", speed: str = "16.0 GT/s PCIe", width: int = 16
) -> str:
    return f'<pci busid="{busid}" class="{kind}" link_speed="{speed}" link_width="{width}">\n{inside}</pci>\n'


def gpu(rank: int, links: str = "", sm: int = 80) -> str:
    return f'<gpu dev="{rank}" sm="{sm}" rank="{rank}" gdr="1">{links}</gpu>\n'


def nvlink(target: str, count: int, target_class: str = "0x030200") -> str:
    return f'<nvlink target="{target}" count="{count}" tclass="{target_class}"/>'


def nic(name: str, speed: int, dev: int = 0) -> str:
    return f'<nic><net name="{name}" dev="{dev}" speed="{speed}" port="1" guid="0x1" gdr="1"/></nic>\n'


BRIDGE = "0x060400"


def imported(text: str, nodes: int = 1) -> Imported:
    result = read_nccl_xml(text, "topology.xml", nodes)
    assert read_topology(result.text, "written") == result.topology
    return result


def links_of(topology: Topology) -> dict[tuple[int, int], Link]:
    links = {(link.src, link.dst): link for link in topology.links}
    assert len(links) == len(topology.links)
    return links


def port_names(topology: Topology, link: Link) -> list[str]:
    return [topology.ports[port].name for port in link.ports]


def test_direct_nvlinks_and_the_pcie_path_of_the_rest() -> None:
    """0 = 1 by two links, 2 = 3 by one; all others over PCIe, 2 switches under one CPU."""
    text = system(
        pci("0000:01:00.0", pci("0000:02:00.0", gpu(0, nvlink("0000:03:00.0", 2), sm=70))
            + pci("0000:03:00.0", gpu(1, nvlink("0000:02:00.0", 2), sm=70)), BRIDGE, "8 GT/s")
        + pci("0000:11:00.0", pci("0000:12:00.0", gpu(2, nvlink("0000:13:00.0", 1), sm=90))
              + pci("0000:13:00.0", gpu(3, nvlink("0000:12:00.0", 1), sm=90)), BRIDGE, "8 GT/s")
    )  # fmt: skip
    topology = imported(text).topology
    links = links_of(topology)
    assert len(links) == 12
    assert (links[0, 1].beta_us_per_mb, links[0, 1].kind, links[0, 1].ports) == (Fraction(25), "nvlink", ())
    assert links[2, 3].beta_us_per_mb == Fraction(1000) / Fraction("20.6")
    across = links[0, 2]
    assert (across.kind, across.beta_us_per_mb) == ("phb", Fraction(1000, 12))  # Gen 3 x16 up to the CPU
    # Of the four wires one decides: the GPUs' own are faster, and all that leaves one switch enters the other.
    assert port_names(topology, across) == ["node0.pci-0000:01:00.0.up"]
    assert across.ports == links[1, 3].ports
    assert not set(across.ports) & set(links[2, 0].ports), "each way has ports of its own"


def test_gpus_on_nvswitches_have_a_port_each_way() -> None:
    switches = nvlink("0000:c4:00.0", 4, "0x068000") + nvlink("0000:c6:00.0", 8, "0x068000")
    text = system("".join(pci(f"0000:0{i}:00.0", gpu(i, switches)) for i in range(4)))
    topology = imported(text).topology
    assert [switch.ranks for switch in topology.switches] == [(0, 1, 2, 3)]
    links = links_of(topology)
    assert len(links) == 12
    assert {link.kind for link in links.values()} == {"nvlink"}
    assert {port.beta_us_per_mb for port in topology.ports} == {Fraction(1000, 240)}  # 12 links of 20 GB/s
    assert port_names(topology, links[1, 3]) == ["node0.nvswitch.rank1.out", "node0.nvswitch.rank3.in"]


def test_between_sockets_pairs_share_one_link_each_way() -> None:
    text = system(
        pci("0000:01:00.0", gpu(0)) + pci("0000:02:00.0", gpu(1)),
        pci("0000:81:00.0", gpu(2)) + pci("0000:82:00.0", gpu(3)),
    )
    topology = imported(text).topology
    links = links_of(topology)
    assert (links[0, 1].kind, links[0, 1].beta_us_per_mb) == ("phb", Fraction(1000, 24))
    assert (links[0, 2].kind, links[0, 2].beta_us_per_mb) == ("sys", Fraction(100))  # Skylake: 10 GB/s
    shared = [i for i, port in enumerate(topology.ports) if port.kind == "sys"]
    assert len(shared) == 2
    crossing = {pair for pair, link in links.items() if shared[0] in link.ports}
    assert crossing in ({(0, 2), (0, 3), (1, 2), (1, 3)}, {(2, 0), (2, 1), (3, 0), (3, 1)})


@pytest.mark.parametrize(
    ("cpu", "gb_per_s"),
    [
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="79"', 6),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"', 22),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="207"', 40),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="173"', 40),
        ('arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49"', 16),
        ('arch="x86_64" vendor="AuthenticAMD" familyid="25" modelid="1"', 24),
        ('arch="x86_64" vendor="AuthenticAMD" familyid="191" modelid="1"', 32),
        ('arch="arm64"', 6),
        ('arch="ppc64"', 32),
    ],
)
def test_rates_between_sockets_are_nccls(cpu: str, gb_per_s: int) -> None:
    text = "<system>" + "".join(
        f'<cpu numaid="{i}" {cpu}>{pci(f"0000:0{i}:00.0", gpu(i), speed="64 GT/s")}</cpu>' for i in range(2)
    )
    topology = imported(text + "</system>").topology
    assert topology.links[0].beta_us_per_mb == Fraction(1000, gb_per_s)


def test_chip_to_chip_links_carry_what_pcie_would() -> None:
    """Grace Hopper: the way to the CPU and on to the other GPU's CPU is C2C, not PCIe."""
    c2c = '<c2c bw="44712" count="10"/>'
    text = "<system>" + "".join(
        f'<cpu numaid="{i}" arch="arm64">{pci(f"0000:0{i}:00.0", gpu(i, c2c, sm=90), speed="2.5 GT/s")}</cpu>'
        for i in range(2)
    )
    topology = imported(text + "</system>").topology
    assert topology.links[0].beta_us_per_mb == Fraction(1000, 6), "bound by the CPUs, not by PCIe Gen 1"


def test_nodes_are_joined_through_the_near_nics() -> None:
    side = "{}{}{}".format
    text = system(
        *(
            pci(f"0000:{n}0:00.0", side(
                pci(f"0000:{n}1:00.0", gpu(2 * n)), pci(f"0000:{n}2:00.0", gpu(2 * n + 1)),
                pci(f"0000:{n}3:00.0", nic(f"mlx5_{n}", 100_000, n), "0x020700"),
            ), BRIDGE)
            for n in range(2)
        )
    )  # fmt: skip
    topology = imported(text, nodes=2).topology
    assert topology.nodes == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert [(nic.name, nic.node, nic.ranks) for nic in topology.nics] == [
        ("node0.mlx5_0", 0, (0, 1)),
        ("node0.mlx5_1", 0, (2, 3)),
        ("node1.mlx5_0", 1, (4, 5)),
        ("node1.mlx5_1", 1, (6, 7)),
    ]
    links = links_of(topology)
    assert len(links) == 8 * 7
    between = links[1, 6]
    assert (between.kind, between.beta_us_per_mb) == ("net", Fraction(80))
    assert port_names(topology, between) == [
        "node0.pci-0000:02:00.0.up",  # GPU 1 also talks to GPU 0 through it
        "node0.mlx5_0.out",
        "node1.mlx5_1.in",
        "node1.pci-0000:11:00.0.down",
    ]


def test_nics_of_a_host_are_shared_evenly_and_slow_ones_left_out() -> None:
    nics = "".join(pci(f"0000:2{i}:00.0", nic(f"mlx5_{i}", 200_000, i), "0x020700") for i in range(2))
    slow = pci("0000:30:00.0", nic("eno1", 1000, 2), "0x020000")
    gpus = "".join(pci(f"0000:1{i}:00.0", gpu(i)) for i in range(4))
    result = imported(system(gpus + nics + slow))
    assert [len(nic.ranks) for nic in result.topology.nics] == [2, 2]
    assert any("eno1" in note for note in result.notes)


def test_nics_of_one_name_are_numbered_past_those_that_have_such_a_name() -> None:
    nics = "".join(
        pci(f"0000:2{i}:00.0", nic(name, 200_000, i), "0x020700")
        for i, name in enumerate(["ib", "ib", "ib-1"])
    )
    gpus = "".join(pci(f"0000:1{i}:00.0", gpu(i)) for i in range(3))
    names = [nic.name for nic in imported(system(gpus + nics), nodes=2).topology.nics if nic.node == 0]
    assert sorted(names) == ["node0.ib", "node0.ib-1", "node0.ib-2"]


def test_ranks_order_the_gpus() -> None:
    text = system(pci("0000:01:00.0", gpu(5, nvlink("0000:02:00.0", 1))) + pci("0000:02:00.0", gpu(3)))
    topology = imported(text).topology
    assert [(link.src, link.dst) for link in topology.links if link.kind == "nvlink"] == [(1, 0)]


def test_a_file_without_gpu_elements_is_read_by_device_class() -> None:
    """Topology files that clouds ship name PCI devices only."""
    result = imported(system(pci("0001:00:00.0", "") + pci("0002:00:00.0", "")))
    assert result.topology.ranks == 2
    assert any("without NVLink" in note for note in result.notes)


def test_hosts_of_one_nvlink_domain_are_nodes() -> None:
    links = nvlink("fffffff:ffff:ff", 18, "0x068000")
    text = "<system>" + "".join(
        f'<cpu host_hash="0x{host}" numaid="0">{pci("0000:01:00.0", gpu(host, links, sm=100))}</cpu>'
        for host in range(3)
    )
    topology = imported(text + "</system>").topology
    assert topology.nodes == ((0,), (1,), (2,))
    assert {link.kind for link in topology.links} == {"nvlink"}
    assert len(topology.links) == 6


def test_gpus_that_nothing_joins_are_told() -> None:
    text = "<system>" + "".join(
        f'<cpu host_hash="0x{host}" numaid="0" arch="arm64">{pci("0000:01:00.0", gpu(host))}</cpu>'
        for host in range(2)
    )
    result = imported(text + "</system>")
    assert any(note.startswith("warning: not connected: rank 1") for note in result.notes)


@pytest.mark.parametrize(
    ("text", "code", "line", "words"),
    [
        ("", "N001", 1, "not well-formed"),
        ("<system>", "N001", 1, "not well-formed"),
        ("<algo/>", "N004", 1, "NCCL_TOPO_DUMP_FILE"),
        ("<system/>", "N006", 1, "no GPU"),
        ('<!DOCTYPE a [<!ENTITY b "c">]>\n<system>&b;</system>', "N003", 1, "not accepted"),
        ('\n<!doctype system SYSTEM "file:///etc/passwd"><system/>', "N003", 2, "not accepted"),
        ("<system>" + "<cpu/>" * 20_000 + "</system>", "N002", 0, "larger"),
        ("<system>" + "<cpu/>" * 300 + "</system>", "N002", 1, "300 NUMA nodes"),
        ("<system>" + "<a>" * 5000 + "</a>" * 5000 + "</system>", "N001", 1, "depth"),
        (system(pci("0000:01:00.0", '<gpu rank="x"/>')), "N005", 3, "rank is 'x'"),
        (system(pci("0000:01:00.0", gpu(0)) + pci("0000:01:00.0", gpu(1))), "N005", 5, "stands twice"),
        (system(pci("?", gpu(0))), "N005", 2, "no bus id"),
        (system(pci("0000:01:00.0", gpu(0)) + pci("0000:02:00.0", gpu(0))), "N006", 6, "rank 0"),
        (
            system(pci("0000:01:00.0", gpu(0)) + pci("0000:02:00.0", gpu(0))).replace("\n", " "),
            "N006",
            1,
            "rank 0 (first in line 1)",
        ),
        (system(pci("0000:01:00.0", gpu(0) + gpu(1))), "N006", 2, "several GPUs"),
        (system(pci("0000:01:00.0", gpu(0, nvlink("0000:01:00.0", 1)))), "N005", 3, "its own target"),
        (system(pci("0000:01:00.0", gpu(0, nvlink("0000:02:00.0", 0)))), "N005", 3, "count is '0'"),
        (system(pci("0000:01:00.0", gpu(0, nvlink("0000:02:00.0", 10**9)))), "N005", 3, "count is"),
        (system(pci("0000:01:00.0", gpu(0), width=-4)), "N005", 2, "link_width is '-4'"),
        (system(pci("0000:01:00.0", '<gpu rank="0"><c2c count="1"/></gpu>\n')), "N005", 3, "bw is missing"),
        (system(pci("0000:01:00.0", nic("a", 10**12))), "N005", 3, "speed is"),
    ],
)
def test_what_is_refused(text: str, code: str, line: int, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_nccl_xml(text, "t.xml")
    found = [(each.code, each.line) for each in caught.value.diagnostics]
    assert (code, line) in found
    assert words in str(caught.value)


def test_an_entity_bomb_ends_soon() -> None:
    text = '<!DOCTYPE a [<!ENTITY b0 "x">' + "".join(
        f'<!ENTITY b{i} "{f"&b{i - 1};" * 10}">' for i in range(1, 20)
    )
    with pytest.raises(InvalidInput, match="N003"):
        read_nccl_xml(f'{text}]><system a="&b19;"/>', "t.xml")


def test_too_many_nodes_are_refused() -> None:
    text = system(pci("0000:01:00.0", gpu(0)) + pci("0000:02:00.0", gpu(1)))
    with pytest.raises(UsageError, match="4098 ranks"):
        read_nccl_xml(text, "t.xml", nodes=2049)


@st.composite
def machines(draw: Any) -> Machine:
    """A random tree of PCIe switches under one or two CPUs, with GPUs and a NIC somewhere."""
    cpus = draw(st.integers(1, 2))
    rates = st.sampled_from([Fraction(8), Fraction(12), Fraction(24)])
    wires = [Wire(0, 1, Fraction(10), "sys", "cpus")] if cpus == 2 else []
    bridges = list(range(cpus))
    vertex = cpus
    for _ in range(draw(st.integers(0, 3))):
        wires.append(Wire(vertex, draw(st.sampled_from(bridges)), draw(rates), "pcie", f"bridge{vertex}"))
        bridges.append(vertex)
        vertex += 1
    devices = []
    for _ in range(draw(st.integers(2, 5))):
        wires.append(Wire(vertex, draw(st.sampled_from(bridges)), draw(rates), "pcie", f"device{vertex}"))
        devices.append(vertex)
        vertex += 1
    nic = NicDevice(devices.pop(), 0, "nic", draw(rates))
    gpus = tuple(Gpu(device, 0, f"gpu{device}") for device in devices)
    return Machine(gpus, (nic,), tuple(wires), cpus=frozenset(range(cpus)))


@given(machines(), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_only_ports_that_decide_nothing_are_left_out(machine: Machine, copies: int) -> None:
    """Each left out has a link no faster than itself alone, or a port that stays and covers it."""
    builder = _Builder(machine, copies)
    builder.build()
    idle = builder.idle_ports()
    crossing = {
        port: {i for i, link in enumerate(builder.links) if port in link.ports}
        for port in range(len(builder.ports))
    }
    betas = [port.beta_us_per_mb for port in builder.ports]
    for port in idle:
        links = crossing[port]
        alone = len(links) == 1 and builder.links[min(links)].beta_us_per_mb >= betas[port]
        covered = any(
            links <= crossing[other] and betas[other] >= betas[port]
            for other in crossing
            if other not in idle
        )
        assert not links or alone or covered
    if copies > 1:
        busy = [port for port in crossing if port not in idle]
        assert {builder.ports[port].name.split(".", 1)[1] for port in busy} >= {"nic.out", "nic.in"}


def dumps() -> list[Any]:
    found = sorted(DUMPS.glob("*.xml"))
    if not found:
        reason = f"the real dumps are not beside the repository ({DUMPS.parent.name}/{DUMPS.name})"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(path, id=path.stem) for path in found]


@pytest.mark.parametrize("path", dumps())
def test_real_dumps(path: Path) -> None:
    text = path.read_text()
    alone, pair = imported(text), imported(text, nodes=2)
    gpus = text.count("<gpu ")
    assert alone.topology.ranks == gpus
    links = links_of(alone.topology)
    assert len(links) == gpus * (gpus - 1), "every pair has its own link or a PCIe path"
    assert sum(link.kind == "xgmi" for link in links.values()) == text.count("<xgmi ")
    assert pair.topology.ranks == 2 * gpus
    assert len(pair.topology.links) >= 2 * gpus * (2 * gpus - 1)
    assert not any("warning" in note for note in (*alone.notes, *pair.notes))
    for link in pair.topology.links:
        if link.kind == "net":
            kinds = Counter(pair.topology.ports[port].kind for port in link.ports)
            assert kinds["nic"] == 2
    shared = Counter(port for link in pair.topology.links for port in link.ports)
    assert max(shared.values()) > 1, "NICs and PCIe are shared"


def test_the_command(tmp_path: Path) -> None:
    source = tmp_path / "t.xml"
    source.write_text(system(pci("0000:01:00.0", gpu(0)) + pci("0000:02:00.0", gpu(1))))
    target = tmp_path / "p.yaml"
    command = load_command("import")
    result = CliRunner().invoke(command, ["nccl", str(source), "-o", str(target)])
    assert result.exit_code == 0, result.output
    assert load_topology(str(target)).ranks == 2
    printed = CliRunner().invoke(command, ["nccl", str(source)])
    assert printed.stdout == target.read_text()


PIECES = [
    "<system>", "</system>", "<cpu numaid='0'>", "</cpu>", "<pci busid='0000:01:00.0' class='0x03'>",
    "</pci>", "<gpu rank='0'/>", "<gpu rank='1' dev='-1'/>", "<nic>", "</nic>", "<net dev='0' speed='-1'/>",
    "&amp;", "<", "<!--", "-->", "<nvlink target='0000:01:00.0' count='1'/>", "]]>", "<?x?>", "\x00", "é",
    "<pcilink/>",
]  # fmt: skip


@given(st.one_of(st.text(max_size=100), st.lists(st.sampled_from(PIECES), max_size=14).map("".join)))
@settings(deadline=None, max_examples=250)
def test_any_text_is_imported_or_refused(text: str) -> None:
    try:
        result = imported(text)
    except InvalidInput as error:
        assert all(found.message and found.code.startswith("N") for found in error.diagnostics)
    else:
        assert result.topology.ranks >= 1


MACHINE = system(
    pci(
        "0000:01:00.0",
        pci("0000:02:00.0", gpu(0, nvlink("0000:03:00.0", 2))) + pci("0000:03:00.0", gpu(1)),
        BRIDGE,
    ),
    pci("0000:81:00.0", gpu(2)) + pci("0000:82:00.0", nic("mlx5_0", 100_000), "0x020700"),
)


@given(st.data())
@settings(deadline=None, max_examples=250)
def test_a_damaged_dump_is_imported_or_refused(data: Any) -> None:
    """Drop, double or replace a piece of a good dump."""
    start = data.draw(st.integers(0, len(MACHINE)))
    end = min(len(MACHINE), start + data.draw(st.integers(0, 30)))
    new = data.draw(
        st.sampled_from(["", MACHINE[start:end] * 2, "0", "-1", "99999999999999999999", '"', "x"])
    )
    try:
        result = imported(MACHINE[:start] + new + MACHINE[end:])
    except InvalidInput as error:
        assert error.diagnostics
    else:
        assert result.topology.ranks >= 1
