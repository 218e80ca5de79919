"""docs/data.md: what keeping documents apart costs."""

from __future__ import annotations

from benchmarks.harness.results import read
from benchmarks.pages.markdown import table

CONTENDERS = ("no documents", "variable-length kernel", "boolean mask", "flex_attention")


def document_mask() -> list[str]:
    """results/document-mask-*.json: tokens a second with each way to keep documents apart, over that without."""
    rows = []
    for measured in read("document-mask"):
        for section, found in measured["sections"].items():
            if not section.startswith("compile="):
                continue
            rates = [found[name]["tokens_per_second"] for name in CONTENDERS]
            documents = found[CONTENDERS[0]]["documents_per_sequence"]
            compiled = section.split(",")[0]
            rows.append(
                [f"`{compiled}`", f"{documents:.1f}", f"{rates[0]:,.0f}", *(f"{r / rates[0]:.2f} ×" for r in rates[1:])]
            )
    return table(["", "documents a sequence", "tokens/s without the mask", *CONTENDERS[1:]], rows)


TABLES = {"document_mask": document_mask}
