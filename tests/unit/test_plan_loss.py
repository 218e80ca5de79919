"""What `loss=auto` becomes, what is refused, and what a module without `choose_loss` gets."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from shardwise.config.compose import compose
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan
from shardwise.plan import kernel_choice as file
from shardwise.plan.kernel_choice import check_takes_loss, explain_loss
from shardwise.plan.plan import Choice
from shardwise.plan.resolve import make_plan

H200 = Host(cuda_devices=1, run_id="made-up", gpu="NVIDIA H200", gpu_capability=(9, 0))
A100 = dataclasses.replace(H200, gpu="NVIDIA A100", gpu_capability=(8, 0))
TWO = dataclasses.replace(H200, cuda_devices=2)
NO_NVML = dataclasses.replace(H200, gpu=None, gpu_capability=None)
CPU = Host(cuda_devices=0, run_id="made-up")
GPT2 = "model=gpt2_124m precision=bf16 data=token_shards data.directory=x"
LARGE = "model=llama3_8b data=token_shards data.directory=anywhere micro_batch_size=1"
OWN = "recipe=custom module._target_=my.Module data._target_=my.Data"
SIZES = "module.vocab_size=128256 module.max_seq_len=8192"


def plan(words: str, host: Host = H200, has_quack: bool = True) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "has_quack", lambda: has_quack)
        return make_plan(compose(words.split()).jobs[0].config, host)


@pytest.mark.parametrize(
    ("words", "host", "has_quack", "name", "reason"),
    [
        ("", CPU, False, "full", "a micro-batch has 512 × 256 logits, few enough"),
        ("precision=bf16", H200, True, "full", "few enough to hold them at once"),
        (GPT2, H200, True, "full", "4,096 × 50,304 logits, few"),
        (f"{GPT2} micro_batch_size=8", H200, True, "fused", "8,192 × 50,304 logits, too many"),
        (f"{LARGE} precision=bf16", H200, True, "fused", "8,192 × 128,256 logits, too many to hold them at once"),
        (f"{LARGE} precision=fp16", H200, True, "fused", "too many"),
        (f"{LARGE} precision=bf16 data.sequence_length=1024", H200, True, "full", "1,024 × 128,256 logits, few"),
        (f"{LARGE} precision=bf16 strategy=fsdp strategy.tensor_parallel_size=2 devices=2", TWO, True, "fused",
         "too many"),
        (f"{LARGE} precision=bf16 strategy=fsdp strategy.tensor_parallel_size=2 devices=2 model.vocab_size=128264", TWO,
         True, "chunked", "multiple of 8 · strategy.tensor_parallel_size = 16, and vocab_size=128264 is none"),
        (f"{LARGE} precision=bf16", H200, False, "chunked", "fused cannot run: quack-kernels is not installed"),
        (f"{LARGE} precision=bf16", A100, True, "chunked", "NVIDIA A100 has 8.0"),
        (f"{LARGE} precision=bf16", NO_NVML, True, "chunked", "compute capability is not known"),
        (f"{LARGE} precision=bf16 accelerator=cpu", H200, True, "chunked", "runs on GPUs alone"),
        (f"{LARGE} precision=fp32", H200, True, "chunked", "precision=fp32 computes in float32"),
        (f"{LARGE} precision=bf16 model.vocab_size=128255", H200, True, "chunked", "vocab_size=128255 is none"),
        (f"{LARGE} precision=bf16 deterministic=true", H200, True, "fused", "too many"),
        ("recipe=image_classification", H200, True, "full", "names no vocab_size"),
        (OWN, H200, True, "full", "names no vocab_size and max_seq_len"),
        (f"{OWN} {SIZES} precision=bf16", H200, True, "fused", "65,536 × 128,256"),
    ],
)  # fmt: skip
def test_auto_is_the_best_that_can_run(words: str, host: Host, has_quack: bool, name: str, reason: str) -> None:
    made = plan(words, host, has_quack)
    assert made.chosen_loss.name == name and reason in made.chosen_loss.reason
    assert Plan.from_json(made.to_json()) == made
    said = explain_loss(made)
    assert said == ([] if name == "full" else [f"loss={name}: {made.chosen_loss.reason}"])


@pytest.mark.parametrize("name", ["full", "chunked", "fused"])
def test_a_named_way_is_taken(name: str) -> None:
    made = plan(f"precision=bf16 loss={name}")
    assert made.chosen_loss == Choice(name, "") and not explain_loss(made)
    assert plan("precision=bf16 loss=fused", NO_NVML, has_quack=False).chosen_loss.name == "fused"  # a login node


@pytest.mark.parametrize(
    ("words", "host", "has_quack", "message"),
    [
        ("precision=bf16", CPU, True, "loss=fused: its kernel runs on GPUs alone; use loss=chunked"),
        ("", H200, True, "precision=fp32 computes in float32; use loss=chunked, or precision=bf16"),
        ("precision=fp64", H200, True, "precision=fp64 computes in float64"),
        ("precision=bf16", A100, True, r"9\.0 \(Hopper\) or later, and NVIDIA A100 has 8\.0; use loss=chunked"),
        ("precision=bf16", H200, False, r"not installed: pip install -e '\.\[kernels\]'; use loss=chunked"),
        ("precision=bf16 model.vocab_size=257", H200, True,
         "multiple of 8, and vocab_size=257 is none; .* or a vocab_size of 264"),
        ("precision=bf16 model.vocab_size=264 strategy=fsdp strategy.tensor_parallel_size=2 devices=2", TWO, True,
         "vocab_size=264 is none; .* or a vocab_size of 272"),
    ],
)  # fmt: skip
def test_fused_is_refused_where_it_cannot_run(words: str, host: Host, has_quack: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        plan(f"{words} loss=fused", host, has_quack)
    assert "\n" not in str(error.value)


class TakesPart:
    def choose_loss(self, name: str) -> None: ...


def test_a_module_without_choose_loss_computes_its_own() -> None:
    own: Any = object()
    large = plan(f"{OWN} {SIZES} precision=bf16")
    assert check_takes_loss(large, TakesPart) == large
    loss = check_takes_loss(large, own).chosen_loss
    assert loss == Choice("full", "my.Module has no choose_loss, so its loss is its own")
    for name in ("full", "chunked", "fused"):
        with pytest.raises(ConfigError, match=rf"loss={name}: my.Module has no choose_loss.*leave it out"):
            check_takes_loss(plan(f"{OWN} loss={name} precision=bf16"), own)


def test_an_earlier_plan_can_be_read() -> None:
    raw = json.loads(plan("").to_json())
    del raw["loss"], raw["chosen_loss"]
    old = Plan.from_json(json.dumps(raw))
    assert old.chosen_loss.name == "full" and old.chosen_loss.reason
    assert check_takes_loss(old, object()).chosen_loss.name == "full"
