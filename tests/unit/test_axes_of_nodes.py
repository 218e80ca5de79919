"""Axes on several nodes, as `shardwise submit` says it before a job queues: refused, told in a line, or as it is."""

from __future__ import annotations

import pytest

from shardwise_tools import main

WORDS = [
    "submit", "nodes=2", "cluster=dgx_h100", "--dry-run", "model=llama3_8b", "data=token_shards", "data.directory=x",
    "strategy=fsdp", "global_batch_size=64", "micro_batch_size=1", "precision=bf16", "name=made-up",
]  # fmt: skip
LINE = "context axis: the {} ranks of a sequence are on several nodes of 8 ranks, so attention waits for the network"


def submit(*words: str) -> int:
    return main([*WORDS, *(f"strategy.{word}" for word in words)])


def test_a_tensor_axis_that_would_cross_nodes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("tensor_parallel_size=16") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert (
        "strategy.tensor_parallel_size=16 does not divide devices=8: the ranks of a tensor axis are on one nod" in err
    )
    assert "use one of [1, 2, 4, 8]" in err


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["context_parallel_size=16"], 16),
        (["context_parallel_size=4", "tensor_parallel_size=4"], 4),
        (["context_parallel_size=8"], 0),
        (["context_parallel_size=2", "tensor_parallel_size=4"], 0),
        (["pipeline_parallel_size=2", "tensor_parallel_size=8"], 0),
        (["pipeline_parallel_size=16"], 0),
    ],
)
def test_a_context_axis_that_crosses_nodes_is_told_and_a_pipeline_may(
    words: list[str], ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(*words) == 0
    out = capsys.readouterr().out
    assert out.count("context axis: ") == (1 if ranks else 0)
    assert not ranks or LINE.format(ranks) in out
