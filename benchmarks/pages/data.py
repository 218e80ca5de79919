"""docs/data.md: how fast `prepare` is, and what keeping documents apart costs."""

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


def prepare_rate() -> list[str]:
    """results/prepare-*.json: the rate beside the bare tokenizer's, and what kills at random moments left."""
    rows = []
    for measured in read("prepare"):
        of, kills = measured["rate"], measured["kills"]
        rate = of["rate"]
        megabytes = {key: rate[key] / 1e6 for key in ("bytes_per_second", "bare_tokenizer_bytes_per_second")}
        rows.append(
            [
                measured["processes"],
                f"{sum(of['text_bytes'].values()) / 1e6:,.0f} MB",
                f"{sum(of['tokens'].values()) / 1e6:,.1f} M",
                f"{rate['seconds']:,.0f} s",
                f"{megabytes['bytes_per_second']:.2f} MB/s",
                f"{megabytes['bare_tokenizer_bytes_per_second']:.2f} MB/s",
                f"{kills['same_bytes']} of {kills['complete']}, after {len(kills['seconds'])} kills",
            ]
        )
    columns = ["processes", "text", "tokens", "time", "rate", "the bare tokenizer", "the same bytes after kills"]
    return table(columns, rows)


TABLES = {"document_mask": document_mask, "prepare_rate": prepare_rate}
