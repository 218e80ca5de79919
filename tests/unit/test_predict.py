"""A row for every sample, whatever a module's predict_step gives."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from shardwise.callbacks.predict import rows_of, to_plain, write_table
from shardwise.data.evaluation import EvaluationLoader
from tests.unit.test_loaders import loader, plan

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize(
    ("outputs", "predictions"),
    [
        (X, [[1, 2], [3, 4]]),
        (X.bfloat16()[:, 0], [1, 3]),
        ({"scores": X, "label": np.array([0, 7])}, [{"scores": [1, 2], "label": 0}, {"scores": [3, 4], "label": 7}]),
        ((X, X[:, 1]), [[[1, 2], 2], [[3, 4], 4]]),
        (["a cat", "a dog"], ["a cat", "a dog"]),
        ([{"words": 1}, {"words": 2}], [{"words": 1}, {"words": 2}]),
    ],
)
def test_outputs_are_cut_along_the_batch(outputs: Any, predictions: list[Any]) -> None:
    evaluation = EvaluationLoader(loader(5), plan(ranks=2), 1, deque().append)
    assert read(rows_of(outputs, X, evaluation, 0)) == [
        {"sample": sample, "prediction": prediction} for sample, prediction in zip((2, 3), predictions, strict=True)
    ]


@pytest.mark.parametrize("outputs", [torch.ones(3), torch.tensor(1.0), {"scores": X, "temperature": 0.5}, "text", {}])
def test_what_has_no_part_for_each_sample_is_one_row(outputs: Any) -> None:
    evaluation = EvaluationLoader(loader(9, sampler=SubsetRandomSampler([8, 8])), plan(), 0, deque().append)
    (row,) = rows_of(outputs, X, evaluation, 0)
    assert row == {"samples": [8, 8], "prediction": outputs}


def test_rows_of_a_stream_name_batch_and_row() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(10))

    evaluation = EvaluationLoader(DataLoader(Stream(), batch_size=2), plan(ranks=2), 1, deque().append)
    rows = read(rows_of(X, {"text": ["a", "b"], "x": X}, evaluation, 3))
    assert rows == [{"batch": 7, "row": 0, "prediction": [1, 2]}, {"batch": 7, "row": 1, "prediction": [3, 4]}]
    assert read(rows_of("all", X, evaluation, 0)) == [{"batch": 1, "prediction": "all"}]


@pytest.mark.parametrize(
    ("predictions", "text"),
    [
        ([{"class": "a, b", "p": 0.5}, {"class": None, "label": 1}], 'sample,class,p,label\n0,"a, b",0.5,\n1,,,1\n'),
        ([3, 4], "sample,prediction\n0,3\n1,4\n"),
        ([[1, 2]], None),
        ([], None),
    ],
)
def test_predictions_without_parts_are_a_table_too(tmp_path: Path, predictions: list[Any], text: str | None) -> None:
    rows, table = tmp_path / "predictions.jsonl", tmp_path / "predictions.csv"
    table.write_text("of an earlier prediction")
    rows.write_text("".join(json.dumps({"sample": i, "prediction": p}) + "\n" for i, p in enumerate(predictions)))
    write_table(rows, table)
    assert (table.read_text() if table.exists() else None) == text


def read(rows: list[dict[str, Any]]) -> Any:
    return json.loads(json.dumps(rows, default=to_plain))
