"""When the kernel of `optim/fused_adamw` has a step of torch's AdamW. benchmarks/gpu_checks/optimizers.py runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import trainer
from shardwise.config.compose import compose
from shardwise.optim import fused_adamw
from shardwise.optim.fused_adamw import is_plain, use_one_kernel
from shardwise.plan import Host, make_plan


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the two kernels each step had. A kernel that is called does nothing."""
    made: list[str] = []
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *_, **__: made.append("torch's"))
    monkeypatch.setattr(fused_adamw, "step_at_once", lambda *_, **__: made.append("one"))
    monkeypatch.setattr(fused_adamw, "is_plain", lambda tensor: tensor.dtype == torch.float32)  # here is no GPU
    monkeypatch.setattr(fused_adamw, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(fused_adamw, "LEAST", 10)
    return made


def step(size: int = 10, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    weights = [nn.Parameter(torch.ones(size - 4, dtype=dtype)), nn.Parameter(torch.ones(4, dtype=dtype))]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    torch.optim.AdamW(weights, fused=True, **options).step()


def test_the_kernel_has_steps_of_large_models_in_fp32(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_adamw, "find_spec", lambda name: name)
    use_one_kernel.__wrapped__()
    step()
    step(11, lr=0.5, weight_decay=0.0)
    assert calls == ["one", "one"]
    step(9)
    step(amsgrad=True)
    step(maximize=True)
    step(lr=torch.tensor(0.1))
    step(dtype=torch.float64)
    monkeypatch.setattr(fused_adamw, "current_device", lambda: torch.device("cuda", 1))
    step()
    assert calls[2:] == ["torch's"] * 6


def test_without_triton_torchs_kernel_stays(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_adamw, "find_spec", lambda name: None)
    use_one_kernel.__wrapped__()
    step()
    assert calls == ["torch's"]


@pytest.mark.parametrize(("accelerator", "there"), [("cuda", 1), ("cpu", 0)])
def test_it_is_there_for_a_modules_own_optimizer(
    accelerator: str, there: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(trainer, "use_one_kernel", lambda: calls.append(1))
    words = ["recipe=custom", "module._target_=tests.configs.foreign.Own", "data._target_=tests.configs.foreign.Data"]
    config = compose([*words, f"runs_dir={tmp_path}", f"accelerator={accelerator}", "devices=1"]).jobs[0].config
    trainer.build_module(make_plan(config, Host(cuda_devices=1, run_id="r")))
    assert len(calls) == there


def test_a_plain_tensor_lies_on_a_gpu() -> None:
    class Own(Tensor):
        pass

    assert not is_plain(torch.ones(4))
    assert not is_plain(torch.ones(4).as_subclass(Own))
