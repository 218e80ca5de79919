"""Families of transformers' models that nobody has tuned anything for: divided they are right, or one message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.test_hugging_face import PIPELINE, check
from tests.harness.families import every
from tests.harness.hugging_face import Run, run_all
from tests.harness.processes import spawn

DOCS = Path(__file__).parents[2] / "docs" / "parallelism.md"
BOUND = 1e-6  # transformers computes norms and softmaxes in fp32
BOTH = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo", "olmo2", "olmo3",
        "smollm3", "granite", "starcoder2", "glm", "glm4", "exaone4", "cohere", "cohere2"]  # fmt: skip
SEQUENCES = ["gpt2", "opt", "gpt_neox", "nemotron", "helium", "persimmon", "mixtral", "qwen2_moe", "jetmoe"]
FAMILIES = {"tensor": BOTH, "heads": BOTH + SEQUENCES, "keys": BOTH + SEQUENCES}
REFUSED = {
    "tensor": {
        "gpt2": "no Hugging Face model in it that brings a tp_plan",
        "mixtral": "which is not supported yet|only colw",
    },
    "heads": {
        "gpt_oss": "GptOssForCausalLM gives its attention s_aux, which cannot be divided",
        "minimax": "positions reach each other in another way",
        "doge": "positions reach each other in another way",
        "bert": "asks for a mask that is not causal",
    },
}
STAGES = [
    Run(PIPELINE, "Gemma2", precision="fp32", optimizer="sgd", model=("query_pre_attn_scalar=4",)),
    Run(PIPELINE, "Olmo2", tied=False),
    Run(PIPELINE, "Phi3", tied=False, model=("pad_token_id=0",)),
    Run(PIPELINE, "SmolLM3", model=("pad_token_id=0",)),
    Run(PIPELINE, "Granite"),
    Run(PIPELINE, "Mistral", tied=False, model=("sliding_window=5",)),
]


@pytest.mark.parametrize("axis", FAMILIES)
def test_a_family_is_right(axis: str) -> None:
    found = spawn(2, every, {axis: FAMILIES[axis]}, timeout_seconds=600)[0]
    print("NUMBERS", *found.items(), sep="\n")
    assert not {name: off for name, off in found.items() if isinstance(off, str) or not off <= BOUND}


@pytest.mark.parametrize("axis", REFUSED)
def test_or_one_message(axis: str) -> None:
    found = spawn(2, every, {axis: list(REFUSED[axis])}, timeout_seconds=300)[0]
    for family, message in REFUSED[axis].items():
        assert re.search(message, str(found[axis, family])), (family, found[axis, family])


def test_two_stages_equal_the_plain_loop(tmp_path: Path) -> None:
    check(STAGES, spawn(2, run_all, tmp_path, 2, STAGES, timeout_seconds=600), tmp_path)


def test_the_docs_name_these_families() -> None:
    _, _, table = DOCS.read_text().partition("These families, ")
    rows = re.findall(r"^\| (tensor|context|pipeline) \| (.*) \|$", table.partition("##")[0], re.MULTILINE)
    named = {axis: set(families.split(", ")) for axis, families in rows}
    stages = {run.family.lower() for run in STAGES} | {"llama", "qwen3"}
    assert named == {"tensor": set(BOTH), "context": set(BOTH + SEQUENCES), "pipeline": stages}
