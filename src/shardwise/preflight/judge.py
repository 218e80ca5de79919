"""Rank 0's part of a preflight: gathers what all ranks report, judges it, and writes a table and files."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from shardwise.config.schema import RunConfig
from shardwise.errors import ExitCode, count
from shardwise.launch.slurm import all_hosts
from shardwise.preflight.node_report import NodeReport
from shardwise.preflight.place import Limits, Place, left, spent
from shardwise.preflight.verdict import Found, Verdict, judge
from shardwise.process.signals import PARENT
from shardwise.run_dir.events import claim_exit_code, job_folder, write_job_file

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PINGS = 5


class Judge:
    """Gathers the reports and judges them, in rank 0's main thread."""

    def __init__(self, store: Store, place: Place, config: RunConfig, limits: Limits) -> None:
        self.store, self.place, self.config, self.limits = store, place, config, limits
        names = all_hosts(os.environ.get("SLURM_STEP_NODELIST", ""))
        if len(names) != place.nodes:
            names = [f"node {node}" for node in range(place.nodes)]
        self.found = Found(names, place.devices, cuda=False)

    def run(self) -> int:
        code = int(ExitCode.crash)
        try:
            verdict = self.gather()
            code = int(verdict.code)
            self.publish(verdict)
        finally:
            self.store.set("verdict", str(code))
            self._wait_for_readers()
        return code

    def _wait_for_readers(self) -> None:
        """Keep the store alive until the others have read the verdict, or for some seconds."""
        until = time.monotonic() + self.limits.grace
        while time.monotonic() < until and int(self.store.add("gone", 0)) < self.place.world - 1:
            time.sleep(0.05)

    def gather(self) -> Verdict:
        """Gather everything that can be found out in time, and judge it."""
        found, place, config = self.found, self.place, self.config
        missing = self._wait([f"here/{rank}" for rank in range(place.world)], self.limits.arrive)
        self._names()
        keys = [f"look/{node}" for node in range(place.nodes)]
        missing |= self._wait(keys, self.limits.arrive)
        for node, key in enumerate(keys):
            if self.store.check([key]):
                found.reports[node] = NodeReport.read(json.loads(self.store.get(key)))
        wants_cuda = config.accelerator == "cuda" or config.cluster.gpu is not None
        found.cuda = config.accelerator != "cpu" and (
            wants_cuda or any(report.gpus for report in found.reports.values())
        )
        if missing:
            self._diagnose()
            found.unmeasured = "not every rank was there"
        else:
            found.unmeasured = self._reason_not_to_measure()
            try:
                self._compare_clocks()
            except Exception as error:  # a node does not answer
                self._diagnose()
                found.unmeasured = f"no answer to a question for the time: {str(error).splitlines()[0]}"
        self.store.set("names", json.dumps(found.names))
        self.store.set("begin", "nothing" if found.unmeasured else "cuda" if found.cuda else "cpu")
        if found.unmeasured is None:
            if self._wait([f"measured/{rank}" for rank in range(place.world)], self.limits.total):
                self._diagnose()
            self._collect()
        wanted = config.devices
        if wanted is None and PARENT in os.environ:  # no number of devices is given: the whole node is inspected
            wanted = config.cluster.devices_per_node
        return judge(found, config.cluster, wanted or place.devices)

    def _wait(self, keys: list[str], until: float) -> set[str]:
        """Wait for keys `until` then, or some seconds after a rank has failed. Returns those that are missing."""
        deadline = time.monotonic() + left(until)
        failing = False
        while not self.store.check(keys) and time.monotonic() < deadline:
            if not failing and self.store.check(["failed"]):
                failing, deadline = True, min(deadline, time.monotonic() + self.limits.grace)
            time.sleep(0.05)
        return {key for key in keys if not self.store.check([key])}

    def _names(self) -> None:
        for node in range(self.place.nodes):
            for rank in self._ranks(node):
                if self.store.check([f"here/{rank}"]):
                    self.found.names[node] = self.store.get(f"here/{rank}").decode()
                    break

    def _ranks(self, node: int) -> range:
        return range(node * self.place.devices, (node + 1) * self.place.devices)

    def _read(self, key: str) -> dict[int, Any]:
        """Rank → what it has written under `key`."""
        keys = {rank: f"{key}/{rank}" for rank in range(self.place.world)}
        return {rank: json.loads(self.store.get(name)) for rank, name in keys.items() if self.store.check([name])}

    def _diagnose(self) -> None:
        """Find out which node is to blame when something is missing.

        These are looked for in order, since each may be a consequence of those before it: ranks that never came,
        processes that are gone, errors, and ranks that are not as far as the others.
        """
        place, found = self.place, self.found
        missing = [rank for rank in range(place.world) if not self.store.check([f"here/{rank}"])]
        before, at = self._read("beat"), self._read("at")
        time.sleep(self.limits.grace)
        after, failed = self._read("beat"), self._read("failed")
        gone = [rank for rank in range(1, place.world) if rank not in missing and before.get(rank) == after.get(rank)]
        seconds = f"{spent():.0f} s"
        for node in range(place.nodes):
            ranks = self._ranks(node)
            if absent := [rank for rank in ranks if rank in missing]:
                found.absent[node] = f"{_ranks_in_words(absent)} did not arrive in {seconds}"
            elif lost := [rank for rank in ranks if rank in gone]:
                step = at.get(lost[0], [0, "its start"])[1]
                found.absent[node] = f"{_ranks_in_words(lost)} fell silent, at {step}: killed, crashed or stopped"
        if found.absent:
            return
        for rank, (_, text, trace) in sorted(failed.items(), key=lambda item: int(item[1][0])):
            node = rank // place.devices
            if not found.failed:  # only the first traceback is printed: the others rarely say more
                sys.stderr.write(f"preflight: {found.names[node]}, rank {rank}:\n{trace}")
            found.failed.setdefault(node, text)
        if found.failed:
            return
        reached = {rank: at.get(rank, [0, "its start"]) for rank in range(place.world)}
        furthest = max(step for step, _ in reached.values())
        behind = {rank: words for rank, (step, words) in reached.items() if step < furthest}
        last = next(words for step, words in reached.values() if step == furthest)
        nodes = {rank // place.devices for rank in behind}
        if not behind or len(nodes) == place.nodes:
            found.stuck = f"{last} did not end within {seconds}, and no node is behind the others: none can be named"
            return
        for node in nodes:
            late = [rank for rank in self._ranks(node) if rank in behind]
            found.absent[node] = (
                f"{_ranks_in_words(late)} came no further than {behind[late[0]]}; the others are at {last}"
            )

    def _reason_not_to_measure(self) -> str | None:
        """Why nothing can be measured although every rank is there; None: it can."""
        reports = self.found.reports.values()
        if self.found.cuda and any(len(report.gpus) < self.place.devices for report in reports):
            return "a node has fewer GPUs than ranks"
        for key in ("torch", "nccl"):
            if len({report.versions.get(key) for report in reports}) > 1:
                return f"nodes with different versions of {key} may not understand each other"
        return None

    def _compare_clocks(self) -> None:
        """Compare the clock of each other node with this node's.

        Of a few questions the quickest counts: it is off by at most half of its round trip.
        """
        self.store.set_timeout(timedelta(seconds=self.limits.grace))
        for node in range(1, self.place.nodes):
            tries = []
            for ping in range(PINGS):
                sent = time.time()
                self.store.set(f"ping/{node}/{ping}", "")
                answer = float(self.store.get(f"pong/{node}/{ping}"))
                received = time.time()
                tries.append(((received - sent) / 2, answer - (sent + received) / 2))
            error, skew = min(tries)
            self.found.skews[node] = (skew, error)
        self.found.skews[0] = (0.0, 0.0)

    def _collect(self) -> None:
        """Collect all ranks' measures. A transfer between nodes, or a sum in one, is as fast as its slowest rank."""
        place, found, measured = self.place, self.found, self._read("measured")
        size = place.devices if place.nodes > 1 else 1
        wrong: list[dict[int, tuple[int, int]]] = [{}, {}]  # wrong values in the node's sum, and in that over all ranks
        for rank, measures in measured.items():
            node, unit = rank // place.devices, rank // size
            if measures["in_node"] is not None:
                found.in_node[node] = min(measures["in_node"], found.in_node.get(node, measures["in_node"]))
            for which, counts in enumerate(measures["wrong"]):
                wrong[which][rank] = tuple(counts)
            for other, rate in measures["pairs"].items():
                pair = min(unit, int(other)), max(unit, int(other))
                # This is the rate of the whole unit if all of its ranks are as slow as this one
                found.pairs[pair] = min(rate * size, found.pairs.get(pair, rate * size))
        for which, words in enumerate(("inside the node", "over all ranks")):
            self._blame_sums(
                {rank: counts for rank, counts in wrong[which].items() if any(counts)}, len(measured), words
            )

    def _blame_sums(self, wrong: dict[int, tuple[int, int]], ranks: int, words: str) -> None:
        """Blame the ranks whose own values were wrong; if there are none, those that alone received a wrong sum."""
        given = [rank for rank, (own, _) in wrong.items() if own]
        if not given and wrong and words == "over all ranks" and len(wrong) > ranks // 2:
            if not self.found.wrong:
                self.found.wrong_everywhere = (
                    f"a sum {words} is wrong on {count(len(wrong), 'rank')}, and each gave the right values"
                )
            return
        for rank in given or list(wrong):
            own, got = wrong[rank]
            what = f"{count(own, 'wrong value')} of its own" if own else count(got, "wrong sum")
            text = f"rank {rank} has {what} in an all-reduce {words}"
            self.found.wrong.setdefault(rank // self.place.devices, text)

    def publish(self, verdict: Verdict) -> None:
        """Print the table and the problems, write what the batch script needs, then the files."""
        found, seconds = self.found, spent()
        names = [found.names[node] for node in verdict.bad]
        lines = [problem.text for problem in verdict.problems]
        if verdict.problems and found.unmeasured:
            lines.append(f"no bandwidths: {found.unmeasured}")
        if verdict.code is ExitCode.bad_node:
            why = None
            if not names:
                why = "no node can be named"
            elif not self.config.exclude_bad_nodes:
                why = "exclude_bad_nodes=false"
            elif len(names) * 2 > len(found.names):
                are = "is" if len(names) == 1 else "are"
                why = (
                    f"{len(names)} of {count(len(found.names), 'node')} {are} bad, more than half ({', '.join(names)})"
                )
            elif any(" " in name for name in names):  # "node 3": its host name is not known
                why = "not all of them have said what they are called"
            if why is None:
                lines.append(f"bad: {', '.join(names)}")
                write_job_file("bad-nodes", "\n".join(names))
            else:
                lines.append(f"{why}: none is left out; preflight=false starts all the same")
        print(table(found, verdict), flush=True)
        sys.stderr.write("".join(f"preflight: {line}\n" for line in lines))
        sys.stderr.flush()
        if verdict.code:
            claim_exit_code(verdict.code, f"preflight: {lines[0]}")
        folder = self._save(verdict, seconds)
        word = "well" if not verdict.problems else f"{len(verdict.problems)} problem{'s' * (len(verdict.problems) > 1)}"
        print(f"preflight: {word}, in {seconds:.1f} s{folder}", flush=True)

    def _save(self, verdict: Verdict, seconds: float) -> str:
        folder = job_folder() or _runs_dir(self.config) / f"preflight-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_json(self.found, verdict, seconds, folder / "preflight.json")
            if self.found.pairs:
                # The first import of matplotlib on a machine may take long, and the picture is not worth that wait
                drawing = threading.Thread(
                    target=save_picture, args=(self.found, folder / "preflight.png"), daemon=True
                )
                drawing.start()
                drawing.join(max(5.0, left(self.limits.total)))
        except OSError as error:
            return f"; {folder} cannot be written: {error.strerror}"
        return f"; {folder}/preflight.json"


def _ranks_in_words(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{' …' * (len(ranks) > 8)}"


def _runs_dir(config: RunConfig) -> Path:
    return Path(os.path.abspath(Path(config.runs_dir).expanduser()))


# Shows what a preflight found: a table, JSON, and a picture of the rates between all pairs.

_COLUMNS = ("node", "GPUs", "ECC", "MHz", "W", "disk GiB", "skew ms", "in node GB/s", "between GB/s", "verdict")


def table(found: Found, verdict: Verdict) -> str:
    """A table with a row for each node. `between` has the median and the least rate with other nodes."""
    rows = [_COLUMNS, *(_row(found, verdict, node) for node in range(len(found.names)))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "─" * max(map(len, lines))
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def _row(found: Found, verdict: Verdict, node: int) -> tuple[str, ...]:
    report, rate = found.reports.get(node), found.in_node.get(node)
    met = [rate for pair, rate in found.pairs.items() if node in pair] if len(found.names) > 1 else []
    skew = found.skews.get(node)
    return (
        found.names[node],
        *(_of_gpus(report) if report and found.cuda else ("–",) * 4),
        f"{min(report.free_gib.values()):,.0f}" if report and report.free_gib else "–",
        f"{round(skew[0] * 1e3, 1) + 0:.1f}" if skew else "–",
        f"{rate:.3g}" if rate else "–",
        f"{median(met):.3g} / {min(met):.3g}" if met else "–",
        _verdict(verdict, node),
    )


def _verdict(verdict: Verdict, node: int) -> str:
    if node in verdict.bad:
        return "bad"
    return "see below" if any(problem.node is None for problem in verdict.problems) else "well"


def _of_gpus(report: NodeReport) -> tuple[str, str, str, str]:
    def each(attribute: str, words: dict[Any, str] | None = None) -> str:
        values = dict.fromkeys(getattr(gpu, attribute) for gpu in report.gpus)
        return " ".join((words or {}).get(v, "–" if v is None else f"{v:g}" if isinstance(v, float) else str(v))
                        for v in values) or "–"  # fmt: skip

    names = each("name").replace("NVIDIA ", "")
    return (f"{len(report.gpus)} × {names}", each("ecc", {True: "on", False: "off"}),
            each("max_clock_mhz"), each("power_limit_w"))  # fmt: skip


def save_json(found: Found, verdict: Verdict, seconds: float, path: Path) -> None:
    names = found.names
    record = {
        "seconds": round(seconds, 1),
        "exit_code": int(verdict.code),
        "bad_nodes": [names[node] for node in verdict.bad],
        "problems": [{"node": None if p.node is None else names[p.node], "text": p.text} for p in verdict.problems],
        "ranks_a_node": found.devices,
        "nodes": [
            {
                "name": name,
                "skew_seconds": found.skews.get(node, (None, None))[0],
                "in_node_gb_per_second": found.in_node.get(node),
                "look": dataclasses.asdict(found.reports[node]) if node in found.reports else None,
            }
            for node, name in enumerate(names)
        ],
        "pairs_are_of": "nodes" if len(names) > 1 else "GPUs" if found.cuda else "processes",
        "pairs_gb_per_second": [[a, b, rate] for (a, b), rate in sorted(found.pairs.items())],
    }
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def save_picture(found: Found, path: Path) -> None:
    """Draw the rates as a matrix: dark is slow, and white is a pair that was not measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    one = len(found.names) == 1
    unit = "GPU" if found.cuda else "process"
    labels = [f"{unit} {n}" for n in range(found.devices)] if one else found.names
    rates = [[float("nan")] * len(labels) for _ in labels]
    for (a, b), rate in found.pairs.items():
        rates[a][b] = rates[b][a] = rate
    side = max(4.0, min(16.0, 0.6 * len(labels) + 2))
    figure, axes = plt.subplots(figsize=(side + 1, side))
    image = axes.imshow(rates, vmin=0, cmap="viridis")
    axes.set_xticks(range(len(labels)), labels, rotation=90)
    axes.set_yticks(range(len(labels)), labels)
    if len(labels) <= 16:
        most = max(found.pairs.values(), default=0)
        for (a, b), rate in found.pairs.items():
            for x, y in ((a, b), (b, a)):
                axes.text(x, y, f"{rate:.3g}", ha="center", va="center", fontsize=8,
                          color="white" if rate < 0.6 * most else "black")  # fmt: skip
    axes.set_title(f"GB/s in one direction, between {'those of ' + found.names[0] if one else 'nodes'}")
    figure.colorbar(image)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
