"""Compares what was found with the cluster file and with other nodes: which problems there are, and on which nodes.

It is pure: no torch, no processes, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from shardwise.config.groups import ClusterConfig
from shardwise.errors import ExitCode, count
from shardwise.plan.hardware import is_gpu
from shardwise.preflight.node_report import Gpu, NodeReport
from shardwise.preflight.pairs import Pair, blame, usual_rate

# The least share of the cluster file's rate. NCCL's all-reduce over eight healthy H200 was measured at 0.77 of NVLink's
# (346 of 450 GB/s at 256 MiB). A GPU or node with half of its links, or with one adapter that does the work of two,
# reaches half of that or less; no known fault gives a rate in between.
SHARE = 0.6
# The least share of the other nodes' median, by whether GPUs are used, if the cluster file has no rate. A CPU's cores
# also do other work, and an Ethernet link that has fallen back to a lower speed reaches a tenth.
SHARE_OF_OTHERS = {True: 0.6, False: 0.2}
# NTP keeps nodes within milliseconds. With a second between them logs cannot be put in order, nor files by their times.
SKEW_SECONDS = 1.0
# With less than this, a run's logs and one small checkpoint, or the sockets and caches of its ranks, do not fit. How
# large the model's checkpoints are is not known here.
FREE_GIB = {"runs_dir": 10.0, "the temporary folder": 1.0}
MEMORY_SHARE = 0.95  # a driver keeps less than 0.05 for itself, and the smaller model of a GPU has half the memory


@dataclass
class Found:
    """What rank 0 has gathered. Nodes are numbers; a node that is not in a mapping has reported nothing."""

    names: list[str]  # the nodes' names
    devices: int  # the number of ranks in a node
    cuda: bool
    reports: dict[int, NodeReport] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)  # node → how it fell silent or behind, in words
    failed: dict[int, str] = field(default_factory=dict)  # node → the error of one of its ranks
    stuck: str | None = None  # what did not end, if no rank was behind the others
    unmeasured: str | None = None  # why nothing was measured
    skews: dict[int, tuple[float, float]] = field(default_factory=dict)  # seconds ahead of node 0's clock, ± seconds
    wrong: dict[int, str] = field(default_factory=dict)  # node → what was wrong with its sum, in words
    wrong_everywhere: str | None = None
    in_node: dict[int, float] = field(default_factory=dict)  # bus bandwidth of an all-reduce, GB/s
    pairs: dict[Pair, float] = field(default_factory=dict)  # GB/s in one direction, of nodes; of GPUs in a single node


@dataclass(frozen=True)
class Problem:
    text: str
    node: int | None = None  # the node that has the problem; None: no node in particular
    kind: str = ""
    code: ExitCode = ExitCode.bad_node


@dataclass(frozen=True)
class Verdict:
    problems: list[Problem]

    @property
    def bad(self) -> list[int]:
        """The nodes that the run should leave out."""
        return sorted({problem.node for problem in self.problems if problem.node is not None})

    @property
    def code(self) -> ExitCode:
        """The exit code. A user's mistake or a failure of most nodes comes first: leaving nodes out would not help."""
        codes = {problem.code for problem in self.problems}
        order = (ExitCode.user_error, ExitCode.crash, ExitCode.bad_node)
        return next((code for code in order if code in codes), ExitCode.done)


def judge(found: Found, cluster: ClusterConfig, wanted: int) -> Verdict:
    """Judge what was found. `wanted`: the number of GPUs that a node must have, if GPUs are used."""
    problems = [Problem(f"{found.names[node]}: {why}", node) for node, why in found.absent.items()]
    if len(found.failed) * 2 > len(found.names):  # one node's error is shown as an example
        node, text = next(iter(found.failed.items()))
        problems.append(Problem(f"{len(found.failed)} of {count(len(found.names), 'node')} failed; "
        f"{found.names[node]}: {text}",
                                code=ExitCode.crash))  # fmt: skip
    else:
        problems += [Problem(f"{found.names[node]}: {text}", node) for node, text in found.failed.items()]
    problems += [Problem(text) for text in (found.stuck, found.wrong_everywhere) if text]
    problems += [Problem(f"{found.names[node]}: {text}", node) for node, text in found.wrong.items()]
    for node, report in found.reports.items():
        problems += [Problem(f"{report.host}: {text}", node) for text in report.trouble]
        problems += [
            Problem(f"{report.host}: {free:.1f} GiB free for {place}, at least {FREE_GIB[place]:g} are needed",
                    node, "disk") for place, free in report.free_gib.items() if free < FREE_GIB[place]
        ]  # fmt: skip
        if found.cuda:
            problems += _gpus(node, report, cluster, wanted, found.devices)
    if found.cuda:
        problems += _alike(found)
    problems += _versions(found) + _skews(found) + _in_node(found, cluster)
    problems += _pairs(found, cluster)
    return Verdict(_everywhere(problems, found, cluster, wanted))


def _gpus(node: int, report: NodeReport, cluster: ClusterConfig, wanted: int, devices: int) -> list[Problem]:
    texts: list[tuple[str, str]] = []
    has, name = len(report.gpus), f"cluster={cluster.name}"
    per_node = cluster.devices_per_node
    if has < wanted or (wanted == per_node and has > wanted):
        what = f"{name} has {wanted}" if wanted == per_node else f"{wanted} {'is' if wanted == 1 else 'are'} needed"
        texts.append(("count", f"{count(has, 'GPU')}, {what}"))
    names = {gpu.name for gpu in report.gpus if gpu.name != "GPU"}
    if other := sorted(n for n in names if cluster.gpu is not None and not is_gpu(cluster.gpu, n)):
        texts.append(("name", f"its GPUs are {', '.join(other)}, {name} has {cluster.gpu}"))
    for number, gpu in enumerate(report.gpus):
        texts += [("", f"GPU {number} {text}") for text in _ill(gpu)]
        if cluster.gpu_memory_gib and (gpu.memory_gib or 1e9) < MEMORY_SHARE * cluster.gpu_memory_gib:
            texts.append(("memory", f"GPU {number} has {gpu.memory_gib:.1f} GiB, {name} {cluster.gpu_memory_gib:g}"))
    return [Problem(f"{report.host}: {text}", node, kind) for kind, text in texts]


def _ill(gpu: Gpu) -> list[str]:
    texts = []
    if gpu.broken:
        texts.append(f"does not answer: {gpu.broken}")
    if gpu.uncorrected:
        were = "was" if gpu.uncorrected == 1 else "were"
        errors = f"{count(gpu.uncorrected, 'ECC error')} that {were} not corrected"
        texts.append(f"has had {errors}, since its driver was loaded")
    if gpu.remapping == "pending":
        texts.append("has memory rows to replace: it needs a reset")
    if gpu.remapping == "failed":
        texts.append("has memory rows that could not be replaced")
    if gpu.slowed:
        texts.append(f"is held down by its hardware: {', '.join(gpu.slowed)}")
    return texts


_T = TypeVar("_T", bound=Hashable)


def _most(values: Sequence[_T]) -> _T | None:
    """The value that more than half of them have."""
    if not values:
        return None
    [(value, times)] = Counter(values).most_common(1)
    return value if times * 2 > len(values) else None


def _alike(found: Found) -> list[Problem]:
    """Problems of GPUs that differ from most of the others, on any node."""
    problems = []
    gpus = [(node, n, gpu) for node, report in found.reports.items() for n, gpu in enumerate(report.gpus)]
    for attribute, words in (
        ("name", "is a {}, the others are {}"),
        ("ecc", "has ECC {}, the others {}"),
        ("max_clock_mhz", "may run at {} MHz, the others at {}"),
        ("power_limit_w", "may draw {} W, the others {}"),
        ("links", "has {} NVLinks up, the others {}"),
    ):
        values = [(node, n, value) for node, n, gpu in gpus if (value := getattr(gpu, attribute)) is not None]
        usual = _most([value for *_, value in values])
        for node, n, value in values:
            if usual is not None and value != usual:
                text = words.format(_in_words(value), _in_words(usual))
                problems.append(Problem(f"{found.names[node]}: GPU {n} {text}", node))
    usual = _most([tuple(report.topology) for report in found.reports.values() if report.topology])
    return problems + [
        Problem(f"{found.names[node]}: its GPUs are joined otherwise than the other nodes' (nvidia-smi topo -m)", node)
        for node, report in found.reports.items()
        if report.topology and usual is not None and tuple(report.topology) != usual
    ]


def _in_words(value: object) -> str:
    return (
        ("on" if value else "off")
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _versions(found: Found) -> list[Problem]:
    """Problems of nodes whose versions differ from those of most nodes."""
    problems = []
    for key in sorted({key for report in found.reports.values() for key in report.versions}):
        versions = {node: report.versions.get(key, "none") for node, report in found.reports.items()}
        if len(set(versions.values())) == 1:
            continue
        word = key.replace("_", " ")
        if (usual := _most(list(versions.values()))) is None:
            who = "; ".join(f"{found.names[node]} {value}" for node, value in list(versions.items())[:4])
            problems.append(Problem(f"no two alike, or no majority, of {word}: {who}"))
        problems += [Problem(f"{found.names[node]}: {word} {value}, the others {usual}", node)
                     for node, value in versions.items() if usual is not None and value != usual]  # fmt: skip
    return problems


def _skews(found: Found) -> list[Problem]:
    """Problems of clocks. With two nodes it is unknown whose clock is wrong; with more, the median counts as right."""
    if len(found.skews) < 2:
        return []
    right = median(skew for skew, _ in found.skews.values()) if len(found.skews) > 2 else 0.0
    off = {
        node: skew - right for node, (skew, error) in found.skews.items() if abs(skew - right) - error > SKEW_SECONDS
    }
    if len(found.skews) == 2 and off:
        [(node, skew)] = off.items()
        return [Problem(f"the clocks of {found.names[0]} and {found.names[node]} are {abs(skew):.1f} s apart")]
    return [Problem(f"{found.names[node]}: its clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}", node)
            for node, skew in off.items()]  # fmt: skip


def _in_node(found: Found, cluster: ClusterConfig) -> list[Problem]:
    known = cluster.nvlink_gb_per_second if found.cuda else None
    problems = []
    for node, rate in found.in_node.items():
        others = [other for number, other in found.in_node.items() if number != node]
        text = None
        if known is not None and rate < SHARE * known:
            text = f"{rate / known:.2f} of cluster={cluster.name}'s {known:g}, at least {SHARE} is expected"
        elif known is None and len(others) > 1 and rate < SHARE_OF_OTHERS[found.cuda] * median(others):
            text = f"the others {median(others):.3g}"
        if text is not None:
            problems.append(
                Problem(
                    f"{found.names[node]}: an all-reduce inside the node at {rate:.3g} GB/s, {text}", node, "nvlink"
                )
            )
    return problems


def _pairs(found: Found, cluster: ClusterConfig) -> list[Problem]:
    """Problems of slow pairs, blamed on the node or GPU that they have in common."""
    gpus = len(found.names) == 1
    if gpus and not (found.cuda and _joined_alike(found.reports.get(0))):
        return []  # processes of one CPU, and GPUs that are joined in different ways, are not alike anyway
    # Pairs of GPUs are not compared with the file's NVLink: NCCL takes fewer channels for them than for an all-reduce.
    known = cluster.network_gb_per_second if found.cuda and not gpus else None
    least = SHARE * known if known else SHARE_OF_OTHERS[found.cuda] * usual_rate(found.pairs)
    slow = {pair: rate for pair, rate in found.pairs.items() if rate < least}
    names = [f"GPU {n}" for n in range(found.devices)] if gpus else found.names
    usual = f"cluster={cluster.name} has {known:g}" if known else f"usual are {usual_rate(found.pairs):.3g}"
    if known and len(slow) == len(found.pairs) > 2:
        return [Problem(f"every pair of nodes is slow: {max(slow.values()):.3g} GB/s at best, {usual}, at least "
                        f"{SHARE} of it is expected; is NCCL on the adapters that it should use (cluster.environment)? "
                        f"Otherwise give cluster.network_gb_per_second=…", code=ExitCode.user_error)]  # fmt: skip
    problems = []
    blamed, left = blame(slow, found.pairs)
    for unit, pairs in blamed.items():
        worst = min(pairs, key=lambda pair: pairs[pair])
        other = names[worst[0] if worst[1] == unit else worst[1]]
        met = sum(unit in pair for pair in found.pairs)
        text = f"slow to {len(pairs)} of {met}: {pairs[worst]:.3g} GB/s to {other}, {usual}"
        problems.append(Problem(f"{found.names[0]}: {names[unit]} is {text}" if gpus else f"{names[unit]}: {text}",
                                0 if gpus else unit, "network"))  # fmt: skip
    if not found.cuda:
        left = {}  # a process may have had to wait for a core once
    return problems + [
        Problem(f"{names[a]} and {names[b]}: {rate:.3g} GB/s between them, {usual}; neither is slow to others as well",
                0 if gpus else None) for (a, b), rate in left.items()
    ]  # fmt: skip


def _joined_alike(report: NodeReport | None) -> bool:
    """Whether each GPU reaches every other in the same way."""
    return report is not None and len({word for row in report.topology for word in row.split()} - {"X"}) == 1


_REMEDY = {
    "name": "give the cluster= that this is, or cluster=local",
    "memory": "give the cluster= that this is, or cluster=local",
    "count": "give devices=, or ask for all GPUs of a node",
    "disk": "make room, or give another runs_dir=",
    "nvlink": "does NCCL use NVLink (NCCL_DEBUG=INFO says)? Otherwise give cluster.nvlink_gb_per_second=…",
}
_EVEN_OF_ONE = ("name", "memory", "disk")  # with a single node, these are no fault of the node either


def _everywhere(problems: list[Problem], found: Found, cluster: ClusterConfig, wanted: int) -> list[Problem]:
    """Replace a problem that all nodes have by a single one: the config is wrong then, not a node."""
    nodes = len(found.names)
    for kind, remedy in _REMEDY.items():
        alike = [problem for problem in problems if problem.kind == kind]
        if len({problem.node for problem in alike}) == nodes and (nodes > 1 or kind in _EVEN_OF_ONE):
            text = alike[0].text if nodes == 1 else f"all {nodes} nodes; {alike[0].text}"
            problems = [problem for problem in problems if problem.kind != kind]
            problems.append(Problem(f"{text}: {remedy}", code=ExitCode.user_error))
    return problems
