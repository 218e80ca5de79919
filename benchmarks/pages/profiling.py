"""docs/profiling.md: the tables that the example's runs printed, and their pictures."""

from __future__ import annotations

from benchmarks.harness.results import read


def _example(name: str) -> list[str]:
    rows = [row for result in read("profile-example") for row in result["rows"] if row["name"] == name]
    if not rows:
        return ["Not run yet."]
    table = rows[0]["table"].partition("\n\ncostliest")[0]
    return ["```text", *table.splitlines(), "```", "", f"![The step of {name}](profiling-{name}.png)"]


def profile_slow() -> list[str]:
    return _example("slow")


def profile_mended() -> list[str]:
    return _example("mended")


def cards() -> list[str]:
    """results/profiles-<gpu>-x<ranks>.json: what each run printed, and its picture."""
    lines = []
    for result in read("profiles"):
        for name, card in result["cards"].items():
            if "table" in card:
                words = " ".join(f"`{word}`" for word in card["words"])
                gpus = f"{result['ranks']} × {result['environment']['gpus'][0]}"
                lines += [f"**{name.replace('-', ' under ')}**, {gpus}: {words}", ""]
                lines += ["```text", *card["table"].splitlines(), "```", ""]
                lines += [f"![The step of {name}](profile-{name}-x{result['ranks']}.png)", ""]
    return lines or ["Not run yet."]


TABLES = {"profile_cards": cards, "profile_slow": profile_slow, "profile_mended": profile_mended}
