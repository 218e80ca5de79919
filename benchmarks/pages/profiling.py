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


TABLES = {"profile_slow": profile_slow, "profile_mended": profile_mended}
