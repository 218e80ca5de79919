"""What Prometheus gets of a run: names, labels, files that are whole, and that go when the run is over."""

import dataclasses
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shardwise.config.groups import MetricsConfig
from shardwise.errors import ConfigError
from shardwise.metrics import prometheus
from shardwise.metrics.nvml import GPU_VALUES, HOST_VALUES
from shardwise.metrics.prometheus import OTHER_SERIES, RANK_SERIES, RUN_SERIES, SUMMED_SERIES, Exporter, RankLabels
from shardwise.plan import Plan
from tests.harness.cells import cell_plan
from tests.harness.patience import wait_until

ROOT = Path(__file__).parents[2]
RANKS = [RankLabels("node1", "GPU-a"), RankLabels('no"de2', "GPU-b")]
ROW = dict.fromkeys(RUN_SERIES | OTHER_SERIES, 2.0)
VALUES = {name: [1.0, 2.0] for name in RANK_SERIES | SUMMED_SERIES}


def plan_of(folder: Path, how: str, directory: Path | None = None, name: str = "run") -> Plan:
    metrics = MetricsConfig(prometheus=how, prometheus_directory=directory and str(directory))  # type: ignore[arg-type]
    return dataclasses.replace(
        cell_plan(folder / name, 2, "micro_batch_size=1", "global_batch_size=2"), metrics=metrics
    )


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, rank) → value, of a file that a real parser has read."""
    return {
        (sample.name, sample.labels.get("rank", "")): sample.value
        for family in text_string_to_metric_families(text) for sample in family.samples
    }  # fmt: skip


def test_every_number_of_telemetry_has_a_series_with_a_base_unit() -> None:
    assert GPU_VALUES.keys() | HOST_VALUES.keys() <= RANK_SERIES.keys() | SUMMED_SERIES.keys()
    every = [*RUN_SERIES.values(), *RANK_SERIES.values(), *SUMMED_SERIES.values(), *OTHER_SERIES.values()]
    names = [series.name for series in every]
    assert len(set(names)) == len(names)
    for series in every:
        assert re.fullmatch(r"[a-z][a-z_]*", series.name) and not re.search("gib|mhz|percent|_total", series.name)
        assert series.says.endswith(".")


def test_a_file_has_the_ranks_numbers_in_base_units_and_goes_at_the_end(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    plan = plan_of(tmp_path, "textfile", site)
    exporter = Exporter(plan, RANKS)
    assert exporter.start() == str(prometheus.paths(plan)[1])
    exporter.update({"train/loss": 2.5, "step": 7.0, "of no series": 1.0},
                    {"gpu/sm_clock_mhz": [1755.0, math.nan], "host/rank_memory_gib": [2.0, 3.0],
                     "gpu/energy_joules": [10.0, math.nan], "gpu/xid_errors": [0.0, 1.0]})  # fmt: skip
    exporter.update({"train/loss": 2.0, "step": 8.0}, {"gpu/energy_joules": [5.0, 4.0], "gpu/xid_errors": [0.0, 1.0]})
    exporter._write()
    for path in prometheus.paths(plan):
        assert samples(path.read_text()) == {
            ("shardwise_loss", ""): 2.0, ("shardwise_step", ""): 8.0, ("shardwise_gpu_energy_joules_total", "0"): 15.0,
            ("shardwise_gpu_energy_joules_total", "1"): 4.0, ("shardwise_gpu_xid_errors_total", "0"): 0.0,
            ("shardwise_gpu_xid_errors_total", "1"): 1.0,
        }  # fmt: skip
    assert [path.suffix for path in site.iterdir()] == [".prom"]  # the node exporter reads no other
    exporter.update(ROW, VALUES)
    exporter._write()
    families = list(text_string_to_metric_families(prometheus.paths(plan)[0].read_text()))
    labels = [sample.labels for family in families for sample in family.samples]
    assert {"run": "run", "runs_dir": str(tmp_path), "rank": "1", "host": 'no"de2', "gpu": "GPU-b"} in labels
    of_run = {"run", "runs_dir"}
    assert all(keys.keys() in (of_run, of_run | {"rank", "host", "gpu"}) for keys in labels)
    assert samples(prometheus.paths(plan)[0].read_text())["shardwise_gpu_sm_clock_hertz", "1"] == 2e6
    exporter.stop()
    assert list(site.iterdir()) == [] and not (tmp_path / "run/metrics.prom").exists()


def test_the_file_is_written_again_by_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_SECONDS", 0.02)
    plan = plan_of(tmp_path, "textfile")
    exporter = Exporter(plan, RANKS)
    exporter.start()
    exporter.update({"step": 3.0}, {})
    (path,) = prometheus.paths(plan)
    wait_until(lambda: ("shardwise_step", "") in samples(path.read_text()), "the row", 20, pause=0.01)
    exporter.stop()


def test_runs_of_a_node_listen_on_ports_of_their_own_and_name_them(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    plans = [plan_of(tmp_path / folder, "http", site) for folder in ("a", "b")]  # two runs of one name
    exporters = [Exporter(plan, RANKS) for plan in plans]
    for number, exporter in enumerate(exporters):
        assert exporter.start().startswith("http://127.0.0.1:")
        exporter.update({"train/loss": float(number)}, {})
    targets = [json.loads(path.read_text())[0] for plan in plans for path in prometheus.paths(plan)]
    assert targets[0] == targets[1] != targets[2] == targets[3] and len(list(site.iterdir())) == 2
    for number, target in ((0, targets[0]), (1, targets[2])):
        with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=20) as answer:
            assert samples(answer.read().decode()) == {("shardwise_loss", ""): number}
    for exporter in exporters:
        exporter.stop()
    assert list(site.iterdir()) == []


@pytest.mark.parametrize("how", ["textfile", "http"])
def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path, how: str) -> None:
    (tmp_path / "site").mkdir()
    plan = plan_of(tmp_path, how, tmp_path / "site")
    (tmp_path / "site").rmdir()  # the run's own file can be written, and the site's cannot
    threads = threading.active_count()
    with pytest.raises(OSError, match="site"):
        Exporter(plan, RANKS).start()
    assert threading.active_count() == threads and not any(path.exists() for path in prometheus.paths(plan))


def test_two_runs_of_one_name_have_no_series_in_common(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    exporters = [Exporter(plan_of(tmp_path / folder, "textfile", site), RANKS) for folder in ("a", "b")]
    for exporter in exporters:
        exporter.update(ROW, VALUES)
        exporter.start()
    series = [
        (sample.name, *sorted(sample.labels.items()))
        for path in site.iterdir()
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    ]
    assert len(set(series)) == len(series), "a node exporter drops a series that it reads twice"
    for exporter in exporters:
        exporter.stop()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            {"prometheus_port": "taken"},
            "metrics.prometheus_port=taken: Address already in use; metrics.",
        ),
        ({"prometheus_address": "no.such.host.invalid"}, "metrics.prometheus_address=no.such.host.invalid: "),
        ({"prometheus_address": "192.0.2.1"}, "metrics.prometheus_address=192.0.2.1: "),
        ({"prometheus": "textfile", "prometheus_directory": "/proc"}, "/proc/shardwise-run-"),
    ],
)
def test_what_cannot_be_listened_on_is_named_with_its_word(tmp_path: Path, words: dict[str, Any], says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        if "prometheus_port" in words:
            words, says = words | {"prometheus_port": port}, says.replace("taken", str(port))
        plan = plan_of(tmp_path, "http")
        exporter = Exporter(dataclasses.replace(plan, metrics=dataclasses.replace(plan.metrics, **words)), RANKS)
        with pytest.raises(OSError) as error:
            exporter.start()
        assert exporter.why_not(error.value).startswith(says)


def test_files_of_killed_runs_go_with_the_next_start_and_no_others(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    killed, alive = plan_of(tmp_path, "textfile", site, "killed"), plan_of(tmp_path, "textfile", site, "alive")
    command = "import sys; from shardwise.plan import Plan; from shardwise.metrics import prometheus as f\n"
    command += "f.write_numbers(Plan.from_json(sys.stdin.read()), 'up 1\\n'); import os; os.kill(os.getpid(), 9)"
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}"}
    subprocess.run([sys.executable, "-c", command], input=killed.to_json(), text=True, env=environment, check=False)
    (site / "other.prom").write_text("of somebody else")
    (site / "shardwise-damaged.prom").write_text("no owner")
    prometheus.write_numbers(alive, "up 1\n")
    gone = prometheus.paths(killed)[1]
    elsewhere = site / "shardwise-elsewhere-1.prom"
    elsewhere.write_text(gone.read_text().replace(f"host {os.uname().nodename}", "host another"))
    assert gone.exists()
    prometheus.remove_abandoned(plan_of(tmp_path, "textfile", site, "next"))
    left = {path.name for path in site.iterdir()}
    assert left == {"other.prom", "shardwise-damaged.prom", elsewhere.name, prometheus.paths(alive)[1].name}
    prometheus.remove_abandoned(killed)  # the run's own folder, when it starts again
    assert not (tmp_path / "killed/metrics.prom").exists() and (tmp_path / "alive/metrics.prom").exists()


def test_a_folder_that_is_not_there_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prometheus_directory=.*/none is no folder: give the folder"):
        prometheus.check_directory(plan_of(tmp_path, "textfile", tmp_path / "none"))
    prometheus.check_directory(plan_of(tmp_path, "textfile", tmp_path))
    prometheus.check_directory(plan_of(tmp_path, "none"))


def panels() -> dict[str, list[str]]:
    """Title → queries, of the dashboard."""
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    return {p["title"]: [t["expr"] for t in p["targets"]] for p in dashboard["panels"] if p["type"] != "row"}


def test_the_dashboard_asks_for_names_that_the_exporter_writes(tmp_path: Path) -> None:
    exporter = Exporter(plan_of(tmp_path, "textfile"), RANKS)
    exporter.start()
    exporter.update(ROW, VALUES)
    exporter._write()
    written = {name for name, _ in samples((tmp_path / "run/metrics.prom").read_text())}
    exporter.stop()
    queries = [query for of_panel in panels().values() for query in of_panel]
    asked = {name for query in queries for name in re.findall(r"\bshardwise_\w+", query)}
    assert asked <= written, f"the dashboard asks for what nobody writes: {sorted(asked - written)}"
    for words in ("loss", "tokens_per_second", "mfu", "power", "temperature", "data_wait", "xid"):
        assert any(words in name for name in asked)
    assert all(query.count("{") == query.count('run=~"$run"') for query in queries)
