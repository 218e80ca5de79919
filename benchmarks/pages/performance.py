"""docs/performance.md: Llama 3 beside torchtitan, images beside a plain loop, and where the fastest step goes."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.harness.breadth_cells import COMPILED, LARGE, STOCK
from benchmarks.harness.breadth_cells import OURS as EAGER
from benchmarks.harness.race_cells import cells_on, runs_in
from benchmarks.harness.results import read
from benchmarks.pages.markdown import device_of, table

OURS = "ours"
IMAGES = {"resnet50": "ResNet-50", "vit_b16": "ViT-B/16", "vit_l16": "ViT-L/16"}
IMAGE_GOALS = {"resnet50": "1.00", "vit_b16": "1.08", "vit_l16": "1.08"}  # ours over the plain loop
NOT_YET = ["Not run yet."]


def races(*ranks: int) -> list[dict[str, Any]]:
    """results/race-<gpu>-x<ranks>.json, without those of models that are too small to say anything."""
    return [race for race in read("race") if not ranks or race["ranks"] in ranks]


def fastest(race: dict[str, Any], cell: str, *, is_ours: bool) -> dict[str, Any] | None:
    """Of the runs that the cell asks for by now."""
    asked = runs_in((cell, *race["cells"][cell]), race["ranks"], is_ours=is_ours)
    cards = [c for c in race["cards"] if (c["cell"], c["words"]) in asked and (c["who"] == OURS) == is_ours]
    return max((c for c in cards if "error" not in c), key=lambda c: c["tokens_per_second_per_gpu"], default=None)


def llama(*ranks: int) -> list[str]:
    """For each cell the fastest run of each, their ratio, and the limit of ours; a table for each kind of GPU."""
    lines, found = [], races(*ranks)
    told = set[tuple[int, str]]()  # what nobody has run stands in the first table of so many GPUs
    ran = {(race["ranks"], card["cell"]) for race in found for card in race["cards"]}
    for race in sorted(found, key=lambda race: (race["ranks"], "H200" not in gpus_of(race))):
        here, count = {card["cell"] for card in race["cards"]}, race["ranks"]
        both = [
            (cell, fastest(race, cell, is_ours=False), fastest(race, cell, is_ours=True)) for cell in race["cells"]
            if cell in here or (count, cell) not in ran | told
        ]  # fmt: skip
        told |= {(count, cell) for cell in race["cells"]}
        goals = {cell.name: cell.goal for cell in cells_on(race["ranks"])}
        limit = "H200" in gpus_of(race)  # whose ceilings are known
        failed = {card["cell"] for card in race["cards"] if card["who"] == OURS and "error" in card}
        rows = [
            _cell(cell, peer, ours, goals.get(cell), limit, "failed" if cell in failed else "not run")
            for cell, peer, ours in both
        ]
        heads = ["", peer_of(race), "ours", "ratio", "goal", "limit", "ours of the limit", "peak reserved GiB, both",
                 "words"]  # fmt: skip
        if len(found) > 1 and rows:
            lines += [f"On {gpus_of(race)}:", ""]
        lines += [*table(heads, rows), "", *_mixed(both)] if rows else []
    return lines or NOT_YET


def gpus_of(race: dict[str, Any]) -> str:
    gpus = race["cards"][0]["environment"]["gpus"] if race["cards"] else []
    return f"{race['ranks']} × {gpus[0] if gpus else 'CPU'}"


def peer_of(race: dict[str, Any]) -> str:
    return next((card["who"] for card in race["cards"] if card["who"] != OURS), "torchtitan (not run)")


def _cell(
    cell: str,
    peer: dict[str, Any] | None,
    ours: dict[str, Any] | None,
    goal: float | None,
    has_limit: bool,
    without: str,
) -> list[Any]:
    """`without`: what became of ours where no run of it has a speed."""
    said = None if goal is None else f"{goal:.2f}"
    if not peer and not ours:
        return [cell, *["not run"] * 2, None, said, *[None] * 4]
    speeds = [None if card is None else card["tokens_per_second_per_gpu"] for card in (peer, ours)]
    limit = ours["limit"]["tokens_per_second_per_gpu"] if ours is not None and has_limit else None
    memory = " / ".join(_gib(card) for card in (peer, ours))
    words = f"ours: {without}" if ours is None else " ".join(f"`{word}`" for word in ours["words"].split())
    return [cell, *(_thousands(speed) for speed in speeds), _share(speeds[1], speeds[0], 3), said, _thousands(limit),
            _share(speeds[1], limit, 2), memory, words]  # fmt: skip


def _mixed(both: list[tuple[str, dict[str, Any] | None, dict[str, Any] | None]]) -> list[str]:
    """Says which ratios are not of one commit and one machine."""
    apart = [
        cell for cell, peer, ours in both
        if peer and ours and any(peer[key] != ours[key] for key in ("commit", "machine"))
    ]  # fmt: skip
    return [f"The two were not measured at one commit on the same GPUs: {'; '.join(apart)}.", ""] if apart else []


def scaling() -> list[str]:
    """The same words on one GPU and on several of the same kind: how much of one GPU's speed each of them keeps."""
    ran = [(race, card) for race in races() for card in race["cards"] if "tokens_per_second_per_gpu" in card]
    several = {card["words"] for _, card in ran if "scaling" in card["cell"]}
    rows, one = [], dict[tuple[str, str], float]()
    for race, card in sorted(ran, key=lambda found: found[0]["ranks"]):
        speed, words, gpus = card["tokens_per_second_per_gpu"], card["words"], gpus_of(race)
        if words in several and (race["ranks"] == 1 or "scaling" in card["cell"]):
            alone = one.setdefault((gpus.partition(" × ")[2], words), speed if race["ranks"] == 1 else 0.0)
            said = " ".join(f"`{word}`" for word in words.split())
            rows.append([gpus, said, _thousands(speed), _share(speed, alone, 3), card["commit"][:7]])
    return table(["GPUs", "words", "tokens/s/GPU", "of one GPU's", "commit"], rows) if rows else NOT_YET


def cards() -> list[str]:
    """Every run: its step, memory, power and clock, so that a reader sees what a slow one was short of."""
    rows = []
    for race in races():
        order = list(race["cells"])
        for card in sorted(race["cards"], key=lambda card: order.index(card["cell"])):
            rows.append(
                [gpus_of(race).replace("NVIDIA ", ""), card["cell"], card["who"], *_card(card), str(card["commit"])[:7]]
            )
    heads = ["GPUs", "cell", "who", "words or flags", "tokens/s/GPU", "ms a step", "GiB", "power, W (limit)",
             "clock, MHz", "loss", "commit"]  # fmt: skip
    on = [card["environment"] for race in races() for card in race["cards"]]
    versions = {(*(str(one[key]) for key in ("python", "cuda", "nccl")), one["packages"]["torch"]) for one in on}
    said = [
        f"Python {python}, torch {torch}, CUDA {cuda}, NCCL {nccl}." for python, cuda, nccl, torch in sorted(versions)
    ]
    return [*said, "", *table(heads, rows)] if rows else NOT_YET


def _card(card: dict[str, Any]) -> list[Any]:
    words = f"`{card['words']}`"
    if "error" in card:
        return [words, card["error"], *[None] * 5]
    felt, limits = card["gpu"], card["machine"]["power_limit_watts"]
    power = f"{felt['power_watts']:.0f}" if "power_watts" in felt else None
    if power and limits and limits[0]:
        power += f" ({limits[0]:.0f})"
    steps, (first, *_, last) = card["steps_ms"], card["losses"]
    return [words, _thousands(card["tokens_per_second_per_gpu"]), f"{min(steps):.1f} to {max(steps):.1f}", _gib(card),
            power, _thousands(felt.get("sm_clock_mhz")), f"{first:.2f} → {last:.2f}"]  # fmt: skip


def breakdown() -> list[str]:
    """Of each step that was profiled: every kind of work, and what it would take at its limit."""
    lines = []
    for race in races():
        for cell, found in race["breakdowns"].items():
            said = " ".join(f"`{word}`" for word in found["words"].split())
            parts = [(part["part"], part["ms"], part["limit_ms"]) for part in found["parts"]]
            parts.append(("all", sum(ms for _, ms, _ in parts), sum(limit for _, _, limit in parts)))
            gpus = gpus_of(race)
            columns = 4 if "H200" in gpus else 2  # whose ceilings are known
            rows = [[name, f"{ms:.1f}", f"{limit:.1f}", f"{ms - limit:.1f}"][:columns] for name, ms, limit in parts]
            lines += [f"{cell} on {gpus}, {said}, commit {str(found['commit'])[:7]}{_since(race, cell, found)}:", ""]
            lines += [*table(["", "ms", "at best", "more"][:columns], rows), ""]
    return lines or NOT_YET


def _since(race: dict[str, Any], cell: str, found: dict[str, Any]) -> str:
    """What a reader should know of a profile when a faster run has been made since."""
    best = fastest(race, cell, is_ours=True)
    if best is None or best["words"] == found["words"]:
        return ""
    return f" (the fastest run by now is that with `{best['words']}`)"


def images() -> list[str]:
    """The rounds in which the Trainer and plain loops took turns; beside the fastest of these."""
    rows = []
    for result in read("images"):
        for section, name in IMAGES.items():
            parts = result["sections"].get(section, {})
            turns = {what: row for what, row in parts.items() if what.startswith("in turn") and row.get("ok")}
            for what, row in turns.items():
                fastest = min(row["median_ratios"], key=row["median_ratios"].get)  # of the plain loops
                ratios = row["ratios"][fastest]
                words = " ".join(f"`{word}`" for word in what.partition(", ")[2].split())
                rows.append([name, row["plan"]["micro_batch_size"], words, _thousands(median(row["rounds"][fastest])),
                             _thousands(row["images_per_second"]), f"{median(ratios):.3f}",
                             f"{min(ratios):.3f} to {max(ratios):.3f}", IMAGE_GOALS[section],
                             row["commit"][:7]])  # fmt: skip
            if not turns:
                rows.append([name, None, None, "not run", "not run", None, None, IMAGE_GOALS[section], None])
    heads = ["", "micro-batch", "words", "plain loop, images/s", "ours", "ratio", "of all rounds", "goal", "commit"]
    return table(heads, rows) if rows else NOT_YET


def strategies() -> list[str]:
    """Llama under every strategy: stock Lightning, ours as it is, and ours compiled; tokens/s/GPU and peak memory."""
    rows = []
    for result in read("breadth"):
        cells = [cell for cell in result["cells"] if cell["model"] in LARGE]
        speeds = {(c["model"], c["strategy"], c["who"]): c for c in cells}
        for model, strategy in dict.fromkeys((cell["model"], cell["strategy"]) for cell in cells):
            stock, plain, fast = (speeds.get((model, strategy, who), {}) for who in (STOCK, EAGER, COMPILED))
            gpus = f"{result['ranks']} × {device_of(result, 'CPU', default='cuda').removeprefix('NVIDIA ')}"
            ratio = _share(*(cell.get("tokens_per_second_per_gpu") for cell in (fast, stock)), 2)
            commits = ", ".join(dict.fromkeys(str(one["commit"])[:7] for one in (stock, plain, fast) if one))
            rows.append([gpus, model, strategy, *map(_speed_and_gib, (stock, plain, fast)), ratio, commits])
    heads = ["GPUs", "model", "strategy", "stock Lightning", "ours", "ours, compiled", "compiled over stock", "commit"]
    return table(heads, rows) if rows else NOT_YET


def _speed_and_gib(cell: dict[str, Any]) -> str:
    if "tokens_per_second_per_gpu" not in cell:
        return cell.get("error", "not run").partition(":")[0]
    return f"{cell['tokens_per_second_per_gpu']:,.0f}, {cell['peak_allocated_gib']:.1f} GiB"


def _thousands(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def _share(value: float | None, whole: float | None, digits: int) -> str | None:
    return None if not value or not whole else f"{value / whole:.{digits}f}"


def _gib(card: dict[str, Any] | None) -> str:
    return "–" if card is None or not card["peak_reserved_gib"] else f"{card['peak_reserved_gib']:.1f}"


TABLES = {
    "race_1": lambda: llama(1), "race_2": lambda: llama(2), "race_node": lambda: llama(4, 8), "race_cards": cards,
    "race_breakdown": breakdown, "race_images": images, "race_strategies": strategies, "race_scaling": scaling,
}  # fmt: skip
