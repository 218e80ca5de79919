"""docs/metrics.md: the peaks of GPUs, what attention's part of the operations is, and the rules of verdicts."""

from __future__ import annotations

import dataclasses

from benchmarks.harness import ROOT
from benchmarks.pages.markdown import table

MODELS = ("gpt2_124m", "llama3_1b", "llama3_8b", "llama3_70b")


def peaks() -> list[str]:
    """conf/cluster/: the dense peak of one GPU, by kind of arithmetic."""
    from shardwise.config.compose import read_clusters

    clusters = read_clusters()
    kinds = [field.name for field in dataclasses.fields(clusters[0].peak_tflops)]
    rows = [
        [c.gpu, f"`cluster={c.name}`", *(f"{peak:,g}" for peak in dataclasses.asdict(c.peak_tflops).values())]
        for c in clusters
    ]
    return table(["GPU", "", *kinds], rows)


def attention() -> list[str]:
    """conf/model/: operations of one token, and how many more it would be with the whole square of attention."""
    import torch
    import yaml

    from recipes.language_modeling.model import Transformer

    rows = []
    for name in MODELS:
        arguments = yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text())
        del arguments["_target_"]
        with torch.device("meta"):
            model = Transformer(**arguments)
        length = model.max_seq_len
        flops = model.training_flops(1, length) / length
        whole = flops + 3 * 2 * 2 * model.n_layers * model.dim * (length - (length + 1) / 2)
        rows.append([name, f"{length:,}", f"{flops / 1e9:,.2f}", f"{whole / 1e9:,.2f}", f"{whole / flops - 1:.1%}"])
    return table(["model", "tokens", "GFLOPs a token", "with the whole square of attention", "more"], rows)


def verdicts() -> list[str]:
    """The rules themselves."""
    from shardwise.metrics.verdict_rules import RULES

    return table(["verdict", "told when", "what helps"], [[rule.name, rule.when, rule.remedy] for rule in RULES])


TABLES = {"peaks": peaks, "attention": attention, "verdicts": verdicts}
