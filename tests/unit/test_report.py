"""The report of a run: what is in it, what never is, and that it is written whatever the folder lacks."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

import shardwise_tools
from shardwise.run_dir import files
from shardwise.run_dir.events import redact, redact_text, redact_words, this_machine
from shardwise_tools.viewer.chart import (
    COLUMNS,
    LEFT,
    Curve,
    charts_of,
    draw,
    draw_heat,
    make_axis,
    range_of_steps,
    series_of,
    short,
    thin,
    ticks,
)
from shardwise_tools.viewer.page import STYLE
from shardwise_tools.viewer.record import read_ranks, read_run
from shardwise_tools.viewer.report import differences, final_numbers, make_comparison, make_report
from shardwise_tools.viewer.state import errors_of, one_line, state_of
from tests.harness.run_folder import DAMAGED, ODD, make_run

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">'


def page_of(folder: Path) -> str:
    return make_report(read_run(folder))


class Tags(HTMLParser):
    """Every tag of a page with its attributes, and whether each is closed again."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_is_safe(page: str) -> None:
    """It runs no program and asks nothing of anybody, and a browser is told so."""
    tags = Tags(page)
    assert not tags.open
    for tag, attributes in tags.found:
        assert tag not in ("script", "iframe", "object", "embed", "form", "base", "a"), tag
        for name, value in attributes.items():
            assert not name.startswith("on") and name != "style", (tag, name)
            assert name not in ("src", "href", "xlink:href", "srcset") or str(value).startswith("data:"), (tag, value)
    (policy,) = (str(at["content"]) for tag, at in tags.found if at.get("http-equiv") == "Content-Security-Policy")
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith("default-src 'none';") and f"style-src 'sha256-{digest}'" in policy
    assert "url(" not in style and "@import" not in style


def test_a_run_gives_the_same_bytes_and_the_parts_in_their_order(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    page = page_of(folder)
    check_is_safe(page)
    assert page == page_of(folder)
    shutil.copytree(folder, tmp_path / "elsewhere" / "one")
    assert page == page_of(tmp_path / "elsewhere" / "one")
    heads = re.findall("<h2>(.*?)</h2>", page)
    assert heads == ["Verdict", "Loss", "Speed", "Memory", "Telemetry", "What happened", "Environment", "Plan",
                     "Command"]  # fmt: skip
    for text in ("ended after 200 steps", "data-bound: rank 1 waits 12 % of the time", "NVIDIA H200", "torch 2.13.0",
                 "655,360", "GPU power watts, by rank", "goes on from step 100",
                 "step-00000100.ckpt is saved"):  # fmt: skip
        assert text in page, text
    assert page.count('class="verdict"') == page.count('class="restart"') > 5
    command = unescape(page[page.rindex("<pre>") + 5 : page.rindex("</pre>")])
    assert [shlex.split(line) for line in command.splitlines()] == [
        ["cd", "/home/me/my work"], ["python", "train.py", "strategy=fsdp", "name=a b"],
    ]  # fmt: skip


def test_a_spike_of_one_step_stays(tmp_path: Path) -> None:
    steps, values = list(range(100_000)), [1.0] * 100_000
    values[54_321], values[77_777] = 9.0, -3.0
    kept = thin(steps, values, 600)
    assert len(kept) <= 1202 and kept == sorted(kept)
    assert {(54_321, 9.0), (77_777, -3.0)} <= set(kept) and kept[0][0] == 0 and kept[-1][0] == 99_999
    assert thin(steps[:50], values[:50], 600) == list(zip(steps[:50], values[:50], strict=True))
    # In a chart the highest point is above all others, and numbers that are none are crosses
    values[10] = float("nan")
    curve = Curve("loss", series_of(zip(steps, values, strict=True)))
    picture = draw("loss", [curve], range_of_steps([curve.series]))
    (path,) = re.findall(r'class="line noise" transform="scale\(.1\)" d="([^"]+)"', picture)
    heights, y = [], 0
    for number, word in enumerate(re.findall(r"-?\d+ ?-?\d+", path.replace("l", " "))):
        x_and_y = re.findall(r"-?\d+", word)
        y = int(x_and_y[1]) + (y if number else 0)
        heights.append(y)
    usual = max(set(heights), key=heights.count)
    assert min(heights) < usual - 300 and max(heights) > usual + 300 and len(heights) < 2 * COLUMNS + 3
    assert picture.count('class="broken"') == 1
    # In a heat map, of a rank's 10,000 values
    table = [(step, rank, 5.0 + (step == 4321 and rank == 1) * 90) for step in range(10_000) for rank in range(2)]
    assert draw_heat("power", table, 2, make_axis([0, 10_000], is_steps=True)) != draw_heat(
        "power", [(step, rank, 5.0) for step, rank, _ in table], 2, make_axis([0, 10_000], is_steps=True)
    )


def test_everything_is_escaped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "<script>alert(0)<b>", ends=1, config=f"name: '{EVIL}'\n'{EVIL}': 1\n",
                      telemetry=(EVIL.replace("/", ""),))  # fmt: skip
    plan = json.loads((folder / files.PLAN).read_text())
    plan |= {"strategy": {"name": EVIL}, "module": {"_target_": EVIL}, EVIL: EVIL}
    (folder / files.PLAN).write_text(json.dumps(plan))
    (folder / files.ENVIRONMENT).write_text(json.dumps({EVIL: EVIL, "packages": {EVIL: EVIL}, "gpus": [EVIL]}))
    with (folder / files.EVENTS).open("a") as file:
        for kind in ("verdict", EVIL, "error"):
            file.write(json.dumps({"time": 1.8e9, "kind": kind, "step": 3, "text": EVIL}) + "\n")
    (folder / files.GUARD).write_text(json.dumps({"step": 3, "what": EVIL}) + "\n")
    files.rank_log(folder, 0).parent.mkdir()
    files.rank_log(folder, 0).write_text(f"Traceback (most recent call last)\n{EVIL}")
    profile = folder / "profile" / "step-000003"
    profile.mkdir(parents=True)
    (profile / files.SUMMARY).write_text(json.dumps({EVIL: EVIL, "kernels": [EVIL]}))
    (profile / "profile.txt").write_text(EVIL)
    (profile / "profile.svg").write_text(f"<svg>{EVIL}</svg>")
    page = page_of(folder)
    check_is_safe(page)
    assert "alert(1)" in page and "<script>alert" not in page
    both = make_comparison([read_run(folder), read_run(make_run(tmp_path / "other"))])
    check_is_safe(both)
    assert "alert(1)" in both


@pytest.mark.parametrize("how", ["missing", "cut", "empty", "garbage", "holes", *ODD])
def test_a_damaged_folder_has_a_report_too(tmp_path: Path, how: str) -> None:
    whole = make_run(tmp_path / "whole", steps=20, ends=1)
    names = [path.name for path in whole.iterdir() if path.is_file()]
    assert {files.METRICS, files.RANKS, files.EVENTS, files.PLAN} <= set(names)
    for number, some in enumerate([*([name] for name in names), names[1:]]):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        for name in some:
            content = (folder / name).read_bytes()
            (folder / name).unlink()
            if how in ODD:
                ODD[how](folder / name)
            elif how != "missing":
                (folder / name).write_bytes(b"" if how == "empty" else DAMAGED[how](content))
        page = page_of(folder)
        check_is_safe(page)
        assert state_of(read_run(folder)).text in unescape(page)


def died_without_verdicts(folder: Path) -> Path:
    make_run(folder, ends=4)
    lines = [line for line in (folder / files.EVENTS).read_text().splitlines(True) if '"verdict"' not in line]
    (folder / files.EVENTS).write_text("".join(lines))
    return folder


def test_a_run_that_died_says_how(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "memory", ends=4))
    assert "died after 200 steps, exit code 4: rank 2 has run out of memory" in page
    assert page.index("micro_batch_size=2 would need less") < page.index("<h2>Loss")
    # Nobody holds the lock that its process on this machine took, and no end was recorded
    killed = read_run(make_run(tmp_path / "killed", ends=None, machine=this_machine()))
    assert state_of(killed).name == "died" and "was it killed?" in make_report(killed)
    assert "No fault was recorded" not in make_report(read_run(died_without_verdicts(tmp_path / "other")))
    # Of a run on another machine nothing can be known but its silence
    away = read_run(make_run(tmp_path / "away", ends=None, machine={"host": "elsewhere"}))
    assert state_of(away).name == "running" and state_of(away, now=4e9).name == "silent"


def test_the_speed_of_a_run_that_died_is_its_mean_as_that_of_one_that_ended(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ends=None)
    rows = ["step,train/step_seconds,train/samples_per_second,train/data_wait,train/loss",
            "1,9.0,1.0,0.9,5", "2,1.0,8.0,0.5,4", "3,,,,3", "4,3.0,2.6666,0.1,2"]  # fmt: skip
    (folder / files.METRICS).write_text("\n".join(rows) + "\n")
    found = final_numbers(read_run(folder))
    assert found["seconds a step"] == 2.0 and found["waiting for data"] == "20.0%"  # (0.5 · 1 + 0.1 · 3) / 4
    assert found["samples/s"] == pytest.approx((8 + 3 * 2.6666) / 4) and found["training loss"] == 2
    (folder / files.METRICS).write_text("\n".join(rows[:2]) + "\n")
    assert final_numbers(read_run(folder))["seconds a step"] == 9.0


def test_a_command_that_was_refused_changes_no_verdict(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with (folder / files.EVENTS).open("a") as file:
        for kind, data in (("command", {"locked": True}), ("error", {}), ("end", {"exit_code": 2})):
            file.write(json.dumps({"time": 1.8e9, "kind": kind, "step": None, "text": "refused", "data": data}) + "\n")
    assert state_of(read_run(folder)).text == "ended after 200 steps"


def test_a_run_of_an_earlier_version(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "old", ranks=1)
    (folder / files.EVENTS).unlink()
    page = page_of(folder)
    assert "ended after 200 steps" in page and "2 checkpoints in the folder" in page
    assert "The command was not recorded" in page


def test_no_secret_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "swordfish-1")
    config = "tokenizer: bpe\nsample_tokens: 7\nurl: https://me:swordfish-2@host/x\nnote: it is swordfish-1\n"
    folder = make_run(tmp_path / "run", ends=1, config=config + "loggers:\n  flow:\n    api_key: swordfish-3\n")
    plan = json.loads((folder / files.PLAN).read_text()) | {"loggers": {"flow": {"api_key": "swordfish-4"}}}
    (folder / files.PLAN).write_text(json.dumps(plan))
    command = [
        "python",
        "train.py",
        "loggers.flow.api_key=swordfish-5",
        "data.hf_token=swordfish-6",
        "a.sample_tokens=5",
    ]
    with (folder / files.EVENTS).open("a") as file:
        text = "Traceback\nConnectionError: password='swordfish-7' to https://me:swordfish-8@host, after 3 tokens: 5"
        for kind, data in (("command", {"command": command}), ("error", {}), ("end", {"exit_code": 1})):
            file.write(json.dumps({"time": 1.8e9, "kind": kind, "step": None, "text": text, "data": data}) + "\n")
    for page in (page_of(folder), make_comparison([read_run(folder), read_run(make_run(tmp_path / "other"))])):
        assert "swordfish" not in page
        assert "sample_tokens" in page and "***" in page
    assert redact({"token": "abc", "pad_token": "<pad>", "n": {"key": 5}}) == {
        "token": "***", "pad_token": "<pad>", "n": {"key": 5},
    }  # fmt: skip
    assert redact_words(["+a.secret=x", "lr=1", "name=a=b"]) == ["+a.secret=***", "lr=1", "name=a=b"]
    assert redact_text("tokens: 5, token=abc; ok") == "tokens: 5, token=***; ok"


def test_a_long_run_of_many_ranks_is_small(tmp_path: Path) -> None:
    """benchmarks/report_size.py does so with 100,000 steps and 64 ranks."""
    page = page_of(
        make_run(tmp_path / "long", steps=600, ranks=32, telemetry=tuple(f"gpu/{n}" for n in range(36)), rank_rows=150)
    )
    assert len(page.encode()) < 1_000_000


def test_runs_side_by_side(tmp_path: Path) -> None:
    more = "a: 1\nb: {c: same, d: x}\n"
    runs = [read_run(make_run(tmp_path / name, seed=seed, config=more.replace("x", name), ends=seed))
            for seed, name in enumerate(("one", "two"))]  # fmt: skip
    assert differences(runs) == [["b.d", "one", "two"]]
    page = make_comparison(runs)
    check_is_safe(page)
    assert page == make_comparison(runs)
    heads = re.findall("<h2>(.*?)</h2>", page)
    assert heads[:4] == ["How they ended", "What differs", "What they came to", "Verdicts"]
    assert "exit code 1: rank 2 has run out of memory" in page
    loss = page[page.index('aria-label="loss"') :]
    assert 'class="c0"' in loss[: loss.index("</svg>")] and 'class="c1"' in loss[: loss.index("</svg>")]


def test_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_run(tmp_path / "runs" / "one", steps=20), make_run(tmp_path / "runs" / "two", steps=20)

    def run(*words: str) -> tuple[int, str]:
        code = shardwise_tools.main(["report", *map(str, words)])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    assert run(str(one)) == (0, f"{one / files.REPORT}\n")
    assert run(str(one), str(two)) == (0, f"{tmp_path / 'runs' / files.REPORT}\n")
    other = tmp_path / "page.html"
    assert run(str(one), "--output", str(other)) == run(str(one), f"output={other}") == (0, f"{other}\n")
    assert other.read_text() == (one / files.REPORT).read_text()
    for words, said in {
        (): "report takes one run or several",
        (str(tmp_path / "none"),): "there is no such folder; give runs/<id>",
        (str(tmp_path),): "is no run's folder",
        (str(one), str(tmp_path / "runs" / files.REPORT)): "is a file: give the folders of runs, such as runs/<id>",
        (str(one), str(one)): "a run is given twice",
        (str(one), f"output={tmp_path}"): "is a folder: give the name of a file in it",
        (str(one), f"output={tmp_path}/none/x.html"): "cannot be written: No such file or directory",
        (str(one), "--output"): "no file follows",
        (str(one), "output=a", "outputs=b"): "outputs",
    }.items():
        code, text = run(*words)
        assert code == 2 and text.startswith("error: ") and said in text and text.count("\n") == 1, text


def test_numbers_are_short_and_ticks_are_round() -> None:
    assert [short(x) for x in (0, 0.00012, 1.5e-7, 3.14159, 1234, 120_000, 3.4e6, 2e9)] == [
        "0", "0.00012", "1.50e-7", "3.142", "1,234", "120k", "3.4M", "2G",
    ]  # fmt: skip
    assert ticks(0, 1, 5) == (0, 0.2, 0.4, 0.6, 0.8, 1) and ticks(-3, 107, 5) == (0, 50, 100)
    assert make_axis([1.0] * 50 + [1e6]).is_log and not make_axis([1.0, 2.0]).is_log
    for values in ([], [float("nan")], [5.0], [0.0, 0.0], [-1e-30, 1e30]):
        axis = make_axis(values)
        assert axis.high > axis.low and all(0 <= axis.share(v) <= 1 for v in (*axis.ticks, 0.5))


def test_a_charts_labels_are_within_it_also_on_a_phone() -> None:
    largest = max(int(size) for size in re.findall(r"svg text {[^}]*font-size: (\d+)px", STYLE))
    assert 0.6 * largest * len("0.00104") <= LEFT - 8  # a digit is about 0.6 of its height wide


def test_numbers_of_ranks_that_are_cut_short(tmp_path: Path) -> None:
    (tmp_path / files.RANKS).write_text("step,time,rank,a\n1,9,0,1.5\n1,9,1,\n2,9,0,inf\n2,9,1,x\n3,9,0,2")
    table = read_ranks(tmp_path)
    assert table.ranks == 2 and table.values == {"a": [(1, 0, 1.5), (2, 0, float("inf"))]}


def test_the_classes_of_each_evaluation_are_in_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "<h2>Classes" not in page_of(run)
    names = ["ant", EVIL, "wasp"]
    rows = {"classes": names, "images": [4, 1, 0], "right": [3, 0, 0], "predicted": [3, 2, 0]}
    (run / "classes_validation.json").write_text(json.dumps(rows))
    (run / "confusion_matrix_validation.png").write_bytes(b"a picture")
    (run / "classes_test.json").write_text(json.dumps(rows | {"right": [4, "x"]}))
    page = page_of(run)
    check_is_safe(page)
    assert (
        "accuracy 60.00%, balanced accuracy 37.50% (the mean over the 2 classes that have images), of 5 images" in page
    )
    assert "accuracy 100.00%, balanced accuracy 100.00%" in page and 'alt="confusion_matrix_validation"' in page
    assert '<td>ant</td><td class="number">4</td><td>75.0%</td><td>100.0%</td>' in page
    for damaged in ("[]", '{"classes": 3}', "{"):
        (run / "classes_validation.json").write_text(damaged)
        assert "<h3>validation" not in page_of(run)


def test_the_launchers_reason_comes_first_and_each_message_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ends=1)
    peer = "rank 0:\nTraceback (most recent call last):\n  RuntimeError: peer is gone\n  the whole traceback is in y"
    (folder / files.EVENTS).write_text("".join(
        json.dumps({"time": 1.8e9, "kind": kind, "step": None, "text": text, "data": data}) + "\n"
        for kind, text, data in (
            ("command", "", {}), ("error", peer, {"rank": 0}), ("error", "killed", {"exit_code": 137}),
            ("error", "killed", {"rank": 1}), ("end", "", {"exit_code": 137}),
        )
    ))  # fmt: skip
    run = read_run(folder)
    assert [error.text for error in errors_of(run)] == ["killed", peer]
    assert state_of(run).text == "died after 200 steps, exit code 137: killed"
    assert one_line(peer) == "RuntimeError: peer is gone"


def test_what_gpus_and_hosts_report_is_telemetry_and_no_speed_or_memory_of_training() -> None:
    one = series_of([(1, 1.0), (2, 2.0)])
    names = ["train/loss", "train/samples_per_second", "train/tokens_per_second", "train/memory_reserved_gib",
             "gpu/nvlink_sent_bytes_per_second", "gpu/memory_temperature_celsius", "host/memory_available_gib",
             "gpu/power_watts", "gpu/power_watts_min", "gpu/power_watts_max", "accuracy"]  # fmt: skip
    charts = charts_of(dict.fromkeys(names, one))
    assert [(chart.section, chart.title) for chart in charts] == [
        ("Loss", "loss"), ("Speed", "tokens/s"), ("Memory", "memory, GiB"), ("Telemetry", "GPU nvlink sent bytes/s"),
        ("Telemetry", "GPU memory temperature celsius"), ("Telemetry", "host memory available GiB"),
        ("Telemetry", "GPU power watts"), ("Other values", "accuracy"),
    ]  # fmt: skip
    (power,) = (chart.curves[0] for chart in charts if chart.title == "GPU power watts")
    assert power.low is one and power.high is one
