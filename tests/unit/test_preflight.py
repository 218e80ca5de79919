"""What a preflight concludes from what it has been told, and who meets whom: no processes, no GPU."""

from __future__ import annotations

import os
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config.groups import ClusterConfig
from shardwise.errors import ExitCode
from shardwise.launch.slurm import all_hosts, first_host
from shardwise.preflight import node_report
from shardwise.preflight.judge import save_json, table
from shardwise.preflight.node_report import Gpu, NodeReport, count_links, hash_code, read_gpu, read_topology, read_xids
from shardwise.preflight.pairs import MOST, SAMPLED, blame, make_rounds
from shardwise.preflight.verdict import Found, Verdict, judge
from shardwise_tools import main
from tests.harness.patience import run_patiently

H100 = ClusterConfig(
    name="dgx_h100", devices_per_node=8, gpu="H100", gpu_memory_gib=80.0, nvlink_gb_per_second=450.0,
    network_gb_per_second=400.0,
)  # fmt: skip
VERSIONS = {"python": "3.12.1", "torch": "2.13.0", "commit": "abc", "code": "1f", "driver": "580.1"}


def healthy(nodes: int, rate: float = 346.0, between: float = 370.0) -> Found:
    """A cluster of DGX H100 of which nothing is to be said."""
    names = [f"dgx{node + 1:02}" for node in range(nodes)]
    gpus = [Gpu("NVIDIA H100 80GB HBM3", 79.6, True, 0, None, 1980.0, 700.0, 700.0, links=18) for _ in range(8)]
    return Found(
        names, 8, True,
        reports={node: NodeReport(name, [Gpu(**vars(gpu)) for gpu in gpus], ["X NV18", "NV18 X"], [],
                          {"runs_dir": 900.0, "the temporary folder": 90.0}, dict(VERSIONS))
               for node, name in enumerate(names)},
        skews={node: (0.001 * node, 0.0002) for node in range(nodes)},
        in_node=dict.fromkeys(range(nodes), rate),
        pairs=dict.fromkeys(combinations(range(nodes), 2), between),
    )  # fmt: skip


def said(verdict: Verdict) -> str:
    return "\n".join(problem.text for problem in verdict.problems)


@pytest.mark.parametrize("nodes", [1, 2, 3, 16])
def test_healthy_nodes_are_well(nodes: int) -> None:
    verdict = judge(healthy(nodes), H100, 8)
    assert verdict.problems == [] and verdict.code is ExitCode.done and verdict.bad == []


def spoil(words: str, found: Found) -> None:
    """The third node."""
    look, gpu = found.reports[2], found.reports[2].gpus[5]
    match words:
        case "gpus":
            look.gpus.pop()
        case "name":
            gpu.name = "NVIDIA H100 PCIe"
        case "memory":
            gpu.memory_gib = 40.0
        case "ecc":
            gpu.ecc = False
        case "uncorrected":
            gpu.uncorrected = 3
        case "remapping":
            gpu.remapping = "pending"
        case "clock":
            gpu.max_clock_mhz = 1410.0
        case "power":
            gpu.power_limit_w = 500.0
        case "slowed":
            gpu.slowed = ["hw_power_brake_slowdown"]
        case "broken":
            gpu.broken = "[Unknown Error]"
        case "links":
            gpu.links = 17
        case "topology":
            look.topology = ["X SYS", "SYS X"]
        case "xid":
            look.trouble = ["Xid 79 of GPU 0000:3b:00 in the kernel's log"]
        case "disk":
            look.free_gib["the temporary folder"] = 0.2
        case "version":
            look.versions["torch"] = "2.12.0"
        case "no commit":
            del look.versions["commit"]
        case "skew":
            found.skews[2] = (-4.0, 0.1)
        case "slow inside":
            found.in_node[2] = 180.0
        case "slow outside":
            found.pairs |= {pair: 150.0 for pair in found.pairs if 2 in pair}
        case "sum":
            found.wrong[2] = "rank 17 has 4 wrong sums in an all-reduce inside the node"
        case "absent":
            found.absent[2] = "ranks 16, 17 did not arrive in 60 s"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("gpus", "dgx03: 7 GPUs, cluster=dgx_h100 has 8"),
        ("name", "dgx03: its GPUs are NVIDIA H100 PCIe, cluster=dgx_h100 has H100"),
        ("memory", "dgx03: GPU 5 has 40.0 GiB, cluster=dgx_h100 80"),
        ("ecc", "dgx03: GPU 5 has ECC off, the others on"),
        ("uncorrected", "dgx03: GPU 5 has had 3 ECC errors that were not corrected"),
        ("remapping", "dgx03: GPU 5 has memory rows to replace: it needs a reset"),
        ("clock", "dgx03: GPU 5 may run at 1410 MHz, the others at 1980"),
        ("power", "dgx03: GPU 5 may draw 500 W, the others 700"),
        ("slowed", "dgx03: GPU 5 is held down by its hardware: hw_power_brake_slowdown"),
        ("broken", "dgx03: GPU 5 does not answer: [Unknown Error]"),
        ("links", "dgx03: GPU 5 has 17 NVLinks up, the others 18"),
        ("topology", "dgx03: its GPUs are joined otherwise than the other nodes'"),
        ("xid", "dgx03: Xid 79 of GPU 0000:3b:00"),
        ("disk", "dgx03: 0.2 GiB free for the temporary folder, at least 1 are needed"),
        ("version", "dgx03: torch 2.12.0, the others 2.13.0"),
        ("no commit", "dgx03: commit none, the others abc"),
        ("skew", "dgx03: its clock is 4.0 s behind"),
        ("slow inside", "dgx03: an all-reduce inside the node at 180 GB/s, 0.40 of cluster=dgx_h100's 450"),
        ("slow outside", "dgx03: slow to 3 of 3: 150 GB/s to dgx"),
        ("sum", "dgx03: rank 17 has 4 wrong sums"),
        ("absent", "dgx03: ranks 16, 17 did not arrive"),
    ],
)
def test_one_node_that_is_not_well_is_named(words: str, text: str) -> None:
    found = healthy(4)
    spoil(words, found)
    verdict = judge(found, H100, 8)
    assert text in said(verdict)
    assert verdict.bad == [2] and verdict.code is ExitCode.bad_node
    row = next(line for line in table(found, verdict).splitlines() if line.startswith("dgx03"))
    assert row.endswith("bad")


@pytest.mark.parametrize("words", ["slow inside", "slow outside"])
def test_where_the_file_says_nothing_the_others_are_the_measure(words: str) -> None:
    unknown = ClusterConfig()
    for nodes in (3, 4):
        found = healthy(nodes)
        spoil(words, found)
        assert judge(found, unknown, 8).bad == [2]
    found = healthy(3, rate=20.0, between=3.0)
    assert judge(found, unknown, 8).problems == []
    found = healthy(2)
    found.in_node[1] = 20.0  # of two nobody can say which is right
    assert judge(found, unknown, 8).problems == []


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("name", "give the cluster= that this is"), ("memory", "give the cluster= that this is"),
        ("disk", "make room"), ("gpus", "give devices="), ("slow inside", "NCCL_DEBUG=INFO"),
        ("slow outside", "cluster.environment"),
    ],
)  # fmt: skip
def test_what_every_node_has_is_a_mistake_in_the_words(word: str, remedy: str) -> None:
    found = healthy(
        4, rate=180.0 if word == "slow inside" else 346.0, between=150.0 if word == "slow outside" else 370.0
    )
    for look in found.reports.values():
        if word == "gpus":
            look.gpus = look.gpus[:4]
        if word == "disk":
            look.free_gib["runs_dir"] = 1.0
        for gpu in look.gpus:
            gpu.name = "NVIDIA A100-SXM4-40GB" if word == "name" else gpu.name
            gpu.memory_gib = 40.0 if word == "memory" else gpu.memory_gib
    verdict = judge(found, H100, 8)
    assert verdict.code is ExitCode.user_error and verdict.bad == []
    assert len(verdict.problems) == 1 and remedy in said(verdict)


def test_of_a_single_node_the_name_is_a_mistake_and_a_missing_gpu_is_not() -> None:
    found = healthy(1)
    found.reports[0].gpus.pop()
    assert judge(found, H100, 8).code is ExitCode.bad_node
    for gpu in found.reports[0].gpus:
        gpu.name = "NVIDIA H200"
    assert judge(found, H100, 8).code is ExitCode.user_error


def test_nodes_may_have_more_gpus_than_a_run_takes() -> None:
    assert judge(healthy(2), H100, 4).problems == []
    assert judge(healthy(2), ClusterConfig(), 4).problems == []
    assert "8 GPUs, 9 are needed" in said(judge(healthy(2), ClusterConfig(), 9))


def test_two_that_differ_are_both_told_and_neither_is_bad() -> None:
    found = healthy(2)
    found.reports[1].versions["torch"] = "2.12.0"
    found.skews[1] = (3.0, 0.1)
    found.pairs[0, 1] = 100.0
    verdict = judge(found, H100, 8)
    assert verdict.bad == [] and verdict.code is ExitCode.bad_node
    for text in ("torch: dgx01 2.13.0; dgx02 2.12.0", "dgx01 and dgx02 are 3.0 s apart", "dgx01 and dgx02: 100 GB/s"):
        assert text in said(verdict)


def test_a_clock_is_right_within_what_can_be_told() -> None:
    found = healthy(3)
    found.skews[1] = (1.5, 0.6)
    assert judge(found, H100, 8).problems == []
    found.skews = {0: (0.0, 0.0), 1: (5.0, 0.1), 2: (5.1, 0.1)}  # rank 0's own is the one that is off
    verdict = judge(found, H100, 8)
    assert verdict.bad == [0] and "dgx01: its clock is 5.0 s behind" in said(verdict)


def test_a_fault_of_most_is_no_nodes() -> None:
    found = healthy(4)
    found.failed = dict.fromkeys(range(3), "rank 0: no such symbol (ImportError)")
    verdict = judge(found, H100, 8)
    assert verdict.code is ExitCode.crash and verdict.bad == []
    found.failed = {1: "rank 8: no such symbol (ImportError)"}
    assert judge(found, H100, 8).bad == [1]


def test_what_cannot_be_blamed_is_told_all_the_same() -> None:
    found = healthy(4)
    found.stuck = "a sum over all ranks did not end"
    assert judge(found, H100, 8).code is ExitCode.bad_node and judge(found, H100, 8).bad == []


def test_slow_pairs_are_blamed_on_whom_they_have_in_common() -> None:
    pairs = dict.fromkeys(combinations(range(6), 2), 370.0)
    two = {pair: 40.0 for pair in pairs if pair in ((0, 3), (1, 3), (2, 3), (3, 4), (0, 5), (1, 5), (2, 5))}
    blamed, left = blame(two, pairs)
    assert set(blamed) == {3, 5} and not left
    assert blame({(0, 3): 40.0}, pairs) == ({}, {(0, 3): 40.0})  # either may be
    assert blame({(0, 3): 40.0, (1, 4): 40.0}, pairs)[0] == {}
    assert blame({(0, 3): 40.0, (0, 1): 40.0}, pairs)[0] == {}  # two of five: three others find it fast
    three = dict.fromkeys(combinations(range(3), 2), 40.0)
    assert blame(three, three) == ({}, three)  # nobody more than anybody else
    assert blame({(0, 1): 40.0}, three) == ({}, {(0, 1): 40.0})
    assert blame({}, pairs) == ({}, {})


def test_gpus_of_a_single_node_are_pairs_too() -> None:
    found = healthy(1)
    found.pairs = {pair: 20.0 if 3 in pair else 300.0 for pair in combinations(range(8), 2)}
    verdict = judge(found, H100, 8)
    assert verdict.bad == [0] and "dgx01: GPU 3 is slow to 7 of 7" in said(verdict)
    found.reports[0].topology = ["X NV4 SYS", "NV4 X SYS", "SYS SYS X"]  # in twos: the others have a longer way
    assert judge(found, H100, 8).problems == []


def test_over_gloo_a_single_slow_pair_is_a_core_that_was_busy() -> None:
    found = healthy(4)
    found.cuda = False
    found.pairs[1, 2] = 1.0
    assert judge(found, H100, 8).problems == []
    found.pairs |= {pair: 1.0 for pair in found.pairs if 2 in pair}
    assert judge(found, H100, 8).bad == [2]


@given(st.integers(2, MOST))
def test_everybody_meets_everybody_once(count: int) -> None:
    rounds = make_rounds(count)
    assert Counter(pair for pairs in rounds for pair in pairs) == Counter(combinations(range(count), 2))
    assert len(rounds) == count - 1 + count % 2
    check_disjoint(rounds)


@given(st.integers(MOST + 1, 300), st.integers(0, 9))
def test_of_many_everybody_meets_equally_many(count: int, seed: int) -> None:
    rounds = make_rounds(count, seed)
    assert len(rounds) == SAMPLED and rounds == make_rounds(count, seed)
    check_disjoint(rounds)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert len(set(pairs)) == len(pairs) and all(0 <= a < b < count for a, b in pairs)
    met = Counter(unit for pair in pairs for unit in pair)
    assert len(met) == count and set(met.values()) == {15 if count % 2 == 0 else 10}


def check_disjoint(rounds: list[list[tuple[int, int]]]) -> None:
    for pairs in rounds:
        assert len({unit for pair in pairs for unit in pair}) == 2 * len(pairs)


def test_another_seed_meets_others() -> None:
    assert make_rounds(40, 0) != make_rounds(40, 1) and make_rounds(41, 0) != make_rounds(41, 1)


ROW = {
    "name": "NVIDIA H200", "memory.total": "143771", "ecc.mode.current": "Enabled",
    "ecc.errors.uncorrected.volatile.total": "0", "remapped_rows.pending": "No", "remapped_rows.failure": "No",
    "clocks.max.sm": "1980", "power.limit": "700.00", "power.default_limit": "700.00", "driver_version": "580.159.04",
    "clocks_event_reasons.hw_slowdown": "Not Active", "clocks_throttle_reasons.hw_slowdown": "Not Active",
}  # fmt: skip


def test_a_row_of_nvidia_smi_is_read() -> None:
    gpu = read_gpu(ROW)
    assert gpu == Gpu("NVIDIA H200", pytest.approx(140.4, abs=0.01), True, 0, None, 1980.0, 700.0, 700.0)
    ill = read_gpu(ROW | {
        "ecc.mode.current": "[N/A]", "ecc.errors.uncorrected.volatile.total": "[N/A]", "remapped_rows.pending": "Yes",
        "clocks_event_reasons.hw_slowdown": "Active", "power.limit": "[Unknown Error]",
    })  # fmt: skip
    assert (ill.ecc, ill.uncorrected, ill.remapping, ill.slowed) == (None, None, "pending", ["hw_slowdown"])
    assert ill.power_limit_w is None and ill.broken == "[Unknown Error]"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi of two GPUs, older than the clocks' event reasons."""
    program = tmp_path / "nvidia-smi"
    known = [key for key in ROW if "event" not in key]
    program.write_text(
        "#!/usr/bin/env python3\nimport sys\n"
        f"row = { ({key: ROW[key] for key in known})!r}\n"
        "words = dict(word.partition('=')[::2] for word in sys.argv[1:])\n"
        "if '-i' in sys.argv and sys.argv[sys.argv.index('-i') + 1] == '0,1,2': sys.exit('No devices were found')\n"
        "fields = words['--query-gpu'].split(',')\n"
        "for field in fields:\n"
        "    if field not in row: print(f'Field \"{field}\" is not a valid field to query.'); sys.exit(2)\n"
        "for _ in range(2): print(', '.join(row[field] for field in fields))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(node_report, "_known", list(node_report._FIELDS))
    return program


@pytest.mark.parametrize("visible", [None, "0,1", "0,1,2"])
def test_an_older_driver_and_a_gpu_that_is_gone_are_no_obstacle(
    smi: Path, visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus, trouble = node_report.read_gpus()
    assert [gpu.name for gpu in gpus] == ["NVIDIA H200"] * 2 and trouble == []


def test_an_nvidia_smi_that_fails_is_told(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.write_text("#!/bin/sh\necho 'GPU is lost. Reboot the system to recover this GPU'; exit 15\n")
    monkeypatch.setattr(node_report, "count_cuda_devices", lambda: 2)
    gpus, trouble = node_report.read_gpus()
    assert len(gpus) == 2 and "exit code 15: GPU is lost" in trouble[0]


def test_what_joins_gpus_is_read() -> None:
    text = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
        "GPU0\t X \tNV18\tPXB\t0-55\t0\t\tN/A\nGPU1\tNV18\t X \tSYS\t0-55\t0\t\tN/A\nNIC0\tPXB\tSYS\t X\n\n"
        "Legend:\n\n  X    = Self\n"
    )
    assert read_topology(text) == ["X NV18", "NV18 X"]
    links = "GPU 0: NVIDIA H100 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
    links += "GPU 1: NVIDIA H100 (UUID: GPU-2)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    assert count_links(links) == [2, 1] and count_links("no NVLink") == [] and read_topology("") == []


def test_of_xids_only_the_hardwares_of_the_last_day_count() -> None:
    text = (
        "[  100.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
        "[99000.000000] NVRM: Xid (PCI:0000:1b:00): 31, pid=77, name=python, Ch 00000010, MMU Fault\n"
        "[99900.000000] NVRM: Xid (PCI:0000:5d:00): 74, pid='<unknown>', NVLink: fatal error\n"
        "[99901.000000] NVRM: Xid (PCI:0000:5d:00): 74, pid='<unknown>', NVLink: fatal error\n"
    )
    assert read_xids(text, 100_000.0) == ["Xid 74 of GPU 0000:5d:00 in the kernel's log"]
    assert len(read_xids(text, 500.0)) == 2  # whose uptime the log's times are ahead of


def test_other_code_has_another_hash(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text("x = 1\n")
    assert hash_code(tmp_path / "a") == hash_code(tmp_path / "b")
    (tmp_path / "b" / "x.py").write_text("x = 2\n")
    assert hash_code(tmp_path / "a") != hash_code(tmp_path / "b")


def test_the_words_are_a_runs_and_the_exit_code_is_the_tools(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import shardwise.preflight.run as tool

    started: list[list[str]] = []
    alone = tool.run_alone
    for word in ("RANK", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(word, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(tool, "run_alone", lambda words, config: started.append(words) or 7)
    words = ["preflight", "devices=8", "global_batch_size=100"]  # which no run could have
    assert main(words) == 7 and started == [words[1:]]
    assert main([*words, "preflight=false"]) == 0 and len(started) == 1
    assert capsys.readouterr().out == "preflight=false: nothing is looked at\n"
    assert main(["preflight", "--help"]) == 0 and "usage: shardwise preflight" in capsys.readouterr().out
    monkeypatch.setattr(tool, "run_alone", alone)
    for wrong, said in (
        ("nodes=2", "nodes=2: started alone, preflight looks at this one node; leave nodes out"),
        ("devices=0", "devices=0: must be at least 1"),
        ("accelerator=cuda", "accelerator=cuda: this process sees 0 CUDA devices; use accelerator=cpu"),
        ("clustre=local", "there is no clustre (did you mean cluster?)"),
    ):
        assert main(["preflight", wrong]) == 2
        assert said in capsys.readouterr().err


def test_a_clusters_environment_comes_before_torch() -> None:
    code = "import shardwise.preflight.run, sys; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    env = os.environ | {"PYTHONPATH": str(Path(node_report.__file__).parents[2])}
    done = run_patiently([sys.executable, "-c", code], 30, env=env)
    assert done.returncode == 0 and done.stdout.strip() == "[]"


def test_slurm_says_nodes_in_short() -> None:
    assert all_hosts("dgx[03-05,09],login1") == ["dgx03", "dgx04", "dgx05", "dgx09", "login1"]
    assert all_hosts("r[1-2]n[8-10]") == ["r1n8", "r1n9", "r1n10", "r2n8", "r2n9", "r2n10"]
    assert all_hosts("dgx01") == ["dgx01"] and all_hosts("") == []
    assert all_hosts("dgx[03-05,09],login1")[0] == first_host("dgx[03-05,09],login1")


def test_the_record_says_what_the_table_does(tmp_path: Path) -> None:
    found = healthy(2)
    verdict = judge(found, H100, 8)
    save_json(found, verdict, 12.3, tmp_path / "preflight.json")
    text = (tmp_path / "preflight.json").read_text()
    assert '"exit_code": 0' in text and '"in_node_gb_per_second": 346.0' in text
    lines = table(found, verdict).splitlines()
    assert lines[3].split("  ")[0] == "dgx01" and "8 × H100 80GB HBM3" in lines[3] and "346" in lines[3]
