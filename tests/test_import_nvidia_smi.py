"""`nvidia-smi topo -m`: what the classes tell, and texts that hold no matrix."""

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
from taccl.profiles.importers.machine import Imported
from taccl.profiles.importers.nvidia_smi import read_nvidia_smi
from taccl.profiles.load import load_topology
from taccl.profiles.profile_file import read_topology
from taccl.profiles.topology import Topology

DGX1V = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tmlx5_0\tmlx5_2\tmlx5_1\tmlx5_3\tCPU Affinity
GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSYS\tSYS\tSYS\tPIX\tSYS\tPHB\tSYS\t0-19,40-59
GPU1\tNV1\t X \tNV2\tNV1\tSYS\tNV2\tSYS\tSYS\tPIX\tSYS\tPHB\tSYS\t0-19,40-59
GPU2\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tNV1\tSYS\tPHB\tSYS\tPIX\tSYS\t0-19,40-59
GPU3\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tSYS\tNV1\tPHB\tSYS\tPIX\tSYS\t0-19,40-59
GPU4\tNV2\tSYS\tSYS\tSYS\t X \tNV1\tNV1\tNV2\tSYS\tPIX\tSYS\tPHB\t20-39,60-79
GPU5\tSYS\tNV2\tSYS\tSYS\tNV1\t X \tNV2\tNV1\tSYS\tPIX\tSYS\tPHB\t20-39,60-79
GPU6\tSYS\tSYS\tNV1\tSYS\tNV1\tNV2\t X \tNV2\tSYS\tPHB\tSYS\tPIX\t20-39,60-79
GPU7\tSYS\tSYS\tSYS\tNV1\tNV2\tNV1\tNV2\t X \tSYS\tPHB\tSYS\tPIX\t20-39,60-79
mlx5_0\tPIX\tPIX\tPHB\tPHB\tSYS\tSYS\tSYS\tSYS\t X \tSYS\tPHB\tSYS\t
mlx5_2\tSYS\tSYS\tSYS\tSYS\tPIX\tPIX\tPHB\tPHB\tSYS\t X \tSYS\tPHB\t
mlx5_1\tPHB\tPHB\tPIX\tPIX\tSYS\tSYS\tSYS\tSYS\tPHB\tSYS\t X \tSYS\t
mlx5_3\tSYS\tSYS\tSYS\tSYS\tPHB\tPHB\tPIX\tPIX\tSYS\tPHB\tSYS\t X \t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def imported(text: str, nodes: int = 1, **rates: Any) -> Imported:
    result = read_nvidia_smi(text, "topo.txt", nodes, **rates)
    assert read_topology(result.text, "written") == result.topology
    return result


def kinds(topology: Topology) -> Counter[str]:
    return Counter(link.kind for link in topology.links)


def matrix(cells: list[str], tail: str = "", gap: str = "  ") -> str:
    names = [f"GPU{i}" for i in range(len(cells))]
    rows = [gap.join([name, *row.split()]) + tail for name, row in zip(names, cells, strict=True)]
    return "\n".join([gap + gap.join(names) + "  CPU Affinity  NUMA Affinity  GPU NUMA ID", *rows])


def test_a_dgx1v_gets_the_wiring_of_the_library() -> None:
    topology = imported(DGX1V).topology
    library = load_topology("dgx1v:1")
    nvlinks = {(x.src, x.dst): x.beta_us_per_mb for x in topology.links if x.kind == "nvlink"}
    expected = {
        (x.src, x.dst): {23: Fraction(25), 46: Fraction(50)}[int(x.beta_us_per_mb)] for x in library.links
    }
    assert nvlinks == expected  # the library's rates are measured, these assumed: 20 GB/s a link
    assert {nic.name: nic.ranks for nic in topology.nics} == {
        "node0.mlx5_0": (0, 1),
        "node0.mlx5_1": (2, 3),
        "node0.mlx5_2": (4, 5),
        "node0.mlx5_3": (6, 7),
    }


def test_pairs_without_nvlink_share_the_way_between_sockets() -> None:
    topology = imported(DGX1V).topology
    assert kinds(topology) == {"nvlink": 32, "sys": 24}
    ports = {port for link in topology.links if link.kind == "sys" for port in link.ports}
    assert sorted(topology.ports[port].name for port in ports) == [
        "node0.cpu0-cpu1.down",
        "node0.cpu0-cpu1.up",
    ]
    assert all(len(link.ports) == 1 for link in topology.links if link.kind == "sys")


def test_nodes_are_joined_through_near_nics() -> None:
    topology = imported(DGX1V, nodes=2).topology
    assert topology.ranks == 16
    assert kinds(topology)["net"] == 2 * 64
    names = [port.name for port in topology.ports]
    link = next(x for x in topology.links if (x.src, x.dst) == (1, 12))
    assert {"node0.mlx5_0.out", "node1.mlx5_2.in"} <= {names[port] for port in link.ports}


def test_nvswitches_are_told_from_links_by_their_number() -> None:
    switched = imported(
        matrix([" ".join("X" if i == j else "NV18" for j in range(8)) for i in range(8)])
    ).topology
    assert [switch.ranks for switch in switched.switches] == [tuple(range(8))]
    assert {port.beta_us_per_mb for port in switched.ports} == {Fraction(1000) / (18 * Fraction("20.6"))}
    direct = imported(
        matrix([" ".join("X" if i == j else "NV4" for j in range(4)) for i in range(4)])
    ).topology
    assert not direct.switches and not direct.ports
    assert {link.beta_us_per_mb for link in direct.links} == {Fraction(1000, 80)}


def test_given_rates_replace_the_assumed_ones() -> None:
    given_rates = {
        "nvlink_gb_per_s": Fraction(25),
        "nic_gb_per_s": Fraction(50),
        "pcie_gb_per_s": Fraction(5),
    }
    topology = imported(DGX1V, nodes=2, **given_rates).topology
    rates = {link.kind: link.beta_us_per_mb for link in topology.links}
    assert rates["sys"] == 200
    nvlinks = {link.beta_us_per_mb for link in topology.links if link.kind == "nvlink"}
    assert nvlinks == {Fraction(40), Fraction(20)}
    assert {port.beta_us_per_mb for port in topology.ports if port.kind == "nic"} == {Fraction(20)}
    assert "assumed" in topology.source and "25 GB/s a link" in topology.source


def test_pcie_classes_make_a_tree() -> None:
    """0-1 under a switch, 2 under the same CPU, 3 under another."""
    topology = imported(matrix(["X PIX PHB SYS", "PIX X PHB SYS", "PHB PHB X SYS", "SYS SYS SYS X"])).topology
    found = {(link.src, link.dst): link.kind for link in topology.links}
    assert (found[0, 1], found[0, 2], found[0, 3]) == ("pcie", "phb", "sys")
    names = [port.name for port in topology.ports]
    up = names.index("node0.pcie-switch0.up")
    assert {(x.src, x.dst) for x in topology.links if up in x.ports} == {(0, 2), (1, 2), (0, 3), (1, 3)}


def test_the_old_name_of_sys_and_joined_cells() -> None:
    """Some drivers print SOC for SYS, and leave tabs out."""
    old = imported(DGX1V.replace("SYS\t", "SOC\t")).topology
    assert kinds(old)["sys"] == 24
    joined = imported(DGX1V.replace("mlx5_0\tmlx5_2", "NIC0NIC1").replace("SYS\tSYS", "SYSSYS")
                      .replace("\nmlx5_0", "\nNIC0").replace("\nmlx5_2", "\nNIC1")).topology  # fmt: skip
    assert kinds(joined) == kinds(old)


def test_escapes_legend_and_noise_around_the_matrix() -> None:
    text = "$ nvidia-smi topo -m\n\x1b[4m" + DGX1V.replace("CPU Affinity", "CPU Affinity\x1b[0m")
    text = (
        text.replace("mlx5_0", "NIC0")
        .replace("mlx5_1", "NIC1")
        .replace("mlx5_2", "NIC2")
        .replace("mlx5_3", "NIC3")
    )
    text += "\nNIC Legend:\n\n  NIC0: mlx5_bond_0\n  NIC1: rocep12s0\n"
    names = [nic.name for nic in imported(text).topology.nics]
    assert names == ["node0.mlx5_bond_0", "node0.NIC2", "node0.rocep12s0", "node0.NIC3"]


def test_affinity_tells_what_nvlink_hides() -> None:
    cells = ["X NV4 NV4", "NV4 X NV4", "NV4 NV4 X"]
    text = matrix(cells, "  0-15  0  N/A")
    assert imported(text).topology.ranks == 3


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("", "N101", 0),
        ("no matrix here", "N101", 0),
        ("GPU0 X NV1", "N101", 0),
        (matrix(["X NV1", "NV1"]), "N103", 3),
        (matrix(["X NV1", "NV1 ABC"]), "N103", 3),
        (matrix(["X NV1", "NV1 NV1"]), "N103", 3),
        (matrix(["X X", "NV1 X"]), "N103", 2),
        (matrix(["X NV4", "SYS X"]), "N103", 2),
        (matrix(["X NV1 PIX", "NV2 X SYS", "PIX SYS X"]), "N103", 2),
        (matrix(["X NV1", "NV1 X"]).rsplit("\n", 1)[0], "N102", 1),
        (matrix(["X NV1", "NV1 X"]) + "\nGPU1  NV1  X", "N102", 4),
        ("  GPU0  GPU0\nGPU0 X X", "N101", 1),
        ("GPU0 " + " ".join(f"GPU{i}" for i in range(1, 2000)), "N104", 1),
    ],
)
def test_what_is_refused(text: str, code: str, line: int) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_nvidia_smi(text, "topo.txt")
    assert [(found.code, found.line) for found in caught.value.diagnostics] == [(code, line)]


def test_the_command(tmp_path: Path) -> None:
    source, target = tmp_path / "topo.txt", tmp_path / "p.yaml"
    source.write_text(DGX1V)
    arguments = ["nvidia-smi", str(source), "-o", str(target), "--nodes", "2", "--nic", "200Gbit/s"]
    result = CliRunner().invoke(load_command("import"), arguments)
    assert result.exit_code == 0, result.output
    assert "assumed those of V100" in result.output
    topology = load_topology(str(target))
    assert {port.beta_us_per_mb for port in topology.ports if port.kind == "nic"} == {Fraction(40)}


CELLS = ["X", "NV1", "NV18", "NV999", "PIX", "PXB", "PHB", "NODE", "SYS", "SOC", "GPU0", "GPU1", "NIC0", "Legend:",
         "\t", "  ", "\n", "\n", "CPU Affinity", "0-3", "\x1b[4m", "NIC0: a b"]  # fmt: skip


@given(
    st.one_of(st.text(max_size=80), st.lists(st.sampled_from(CELLS), max_size=25).map(" ".join)), st.data()
)
@settings(deadline=None, max_examples=200)
def test_any_text_is_imported_or_refused(text: str, data: Any) -> None:
    cut = data.draw(st.integers(0, len(DGX1V)))
    for candidate in (text, DGX1V[:cut] + text + DGX1V[cut + len(text) :]):
        try:
            result = imported(candidate)
        except InvalidInput as error:
            assert all(found.code.startswith("N1") for found in error.diagnostics)
        else:
            assert result.topology.ranks >= 1


def test_a_board_of_four_h100_is_told_by_all_links_of_a_gpu() -> None:
    cells = [["X" if a == b else "NV6" for b in range(4)] for a in range(4)]
    rows = ["GPU0 GPU1 GPU2 GPU3", *(f"GPU{a} " + " ".join(row) for a, row in enumerate(cells))]
    found = imported("\n".join(rows) + "\n")
    assert "assumed those of H100" in found.notes[0]
    assert {link.kind for link in found.topology.links} == {"nvlink"}


@pytest.mark.parametrize("rate", ["1kbit/s", "1e-400us/MB"])
def test_rates_that_no_profile_may_have_are_refused(tmp_path: Path, rate: str) -> None:
    (tmp_path / "topo.txt").write_text(DGX1V)
    arguments = ["nvidia-smi", str(tmp_path / "topo.txt"), "-o", str(tmp_path / "p.yaml"), "--nic", rate]
    result = CliRunner().invoke(load_command("import"), arguments)
    assert isinstance(result.exception, UsageError) or result.exit_code == 2
    assert not (tmp_path / "p.yaml").exists()
