"""Muon for hidden matrices, and AdamW for everything else, as one optimizer with several groups of parameters.

A step of Muon moves a matrix along its momentum with all singular values made alike (Jordan, "Muon: An optimizer for
hidden layers in neural networks", 2024). This needs the whole matrix. Where ranks hold parts of it, or the same copies,
they divide the matrices among themselves: see distributed/dtensor.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shardwise.optim.adamw import StepsByGroups, found_inf_of
from shardwise.optim.matrices import MATRICES, Matrices

SCALES = ("match_rms_adamw", "original")
# Those of torch.optim.Muon.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


class WholeMatrices:
    """The `Matrices` of a single rank."""

    def rows(self, parameter: Tensor) -> int:
        return parameter.shape[0]

    def map(
        self,
        parameters: list[Tensor],
        give: Callable[[Tensor], Tensor],
        function: Callable[[Tensor], Tensor],
        take: Callable[[Tensor, Tensor], None],
    ) -> None:
        for parameter in parameters:
            take(parameter, function(give(parameter)))


class MuonAdamW(StepsByGroups):
    """Muon for groups with `algorithm="muon"`, AdamW for those with `algorithm="adamw"`.

    The numbers are those of torch.optim.Muon and torch.optim.AdamW.

    `momentum`, `nesterov`, `newton_schulz_steps`: of Muon. `betas`, `eps`: of AdamW. `lr`, `weight_decay`: of both.
    `adamw_lr_factor`: AdamW's learning rate is `lr` times this. `scale`: "match_rms_adamw" makes updates as large as
    AdamW's usually are, so that one learning rate serves both (Liu et al., "Muon is scalable for LLM training", 2025);
    "original" is Jordan's, for rates around 0.02. `newton_schulz_dtype`: in which matrices are orthogonalised; "auto":
    that of the parameter. `matrices` says which parameters Muon has: see optim/matrices.py, which makes the groups.

    A parameter of a group of Muon's with more than two dimensions counts as a matrix of its first against all others.
    """

    reads_found_inf = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        newton_schulz_steps: int = 5,
        adamw_lr_factor: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        scale: str = "match_rms_adamw",
        newton_schulz_dtype: str = "auto",
        matrices: str | list[str] = "layers",
    ) -> None:
        for name, value, allowed in (
            ("lr", lr, lr >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
            ("momentum", momentum, 0 <= momentum < 1),
            ("newton_schulz_steps", newton_schulz_steps, 1 <= newton_schulz_steps < 100),
            ("adamw_lr_factor", adamw_lr_factor, adamw_lr_factor >= 0),
            ("betas", list(betas), all(0 <= beta < 1 for beta in betas)),
            ("eps", eps, eps >= 0),
            ("scale", scale, scale in SCALES),
        ):
            if not allowed:
                known = f"; known are {', '.join(SCALES)}" if name == "scale" else ""
                raise ValueError(f"{name}={value} is not possible for Muon{known}")
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
                    "newton_schulz_steps": newton_schulz_steps, "newton_schulz_dtype": newton_schulz_dtype,
                    "scale": scale, "adamw_lr_factor": adamw_lr_factor, "betas": betas, "eps": eps,
                    "algorithm": MATRICES, "capturable": True}  # fmt: skip
        super().__init__(params, defaults)
        self._matrices: Matrices = WholeMatrices()
        for group in self.param_groups:
            if group["algorithm"] == MATRICES and any(p.ndim < 2 for p in group["params"]):
                raise ValueError("Muon moves matrices: give vectors in a group with algorithm='adamw'")

    def use_matrices(self, matrices: Matrices) -> None:
        """Compute functions of whole matrices with `matrices` from now on."""
        self._matrices = matrices

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """What is kept for a parameter before its first step."""
        group = next(group for group in self.param_groups if any(p is parameter for p in group["params"]))
        if group["algorithm"] == MATRICES:
            return {"momentum_buffer": torch.zeros_like(parameter)}
        moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **moments}

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        (self._step_matrices if group["algorithm"] == MATRICES else self._step_others)(group, parameters)

    def _step_matrices(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        rate, decay, momentum = float(group["lr"]), 1 - float(group["lr"]) * group["weight_decay"], group["momentum"]
        dtype = group["newton_schulz_dtype"]

        def give(p: Tensor) -> Tensor:
            buffer, gradient = self.state[p]["momentum_buffer"], p.grad
            assert gradient is not None
            self._write(buffer, buffer.lerp(gradient, 1 - momentum))
            update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
            return update.to(p.dtype if dtype == "auto" else getattr(torch, dtype)).flatten(1)

        def take(p: Tensor, update: Tensor) -> None:
            factor = update_scale(self._matrices.rows(p), update.shape[1], group["scale"])
            self._write(p, (p * decay).add_(update.view(p.shape), alpha=-rate * factor))

        steps = group["newton_schulz_steps"]
        self._matrices.map(parameters, give, lambda matrix: orthogonalize(matrix, steps), take)

    def _write(self, target: Tensor, value: Tensor) -> None:
        """Change `target`, unless the step does not count, which only the device may know."""
        found = found_inf_of(self)
        target.copy_(value if found is None else torch.where(found > 0, target, value))

    def _step_others(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[p] for p in parameters]
        adamw(
            [p.detach() for p in parameters],
            [p.grad for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,  # it reads `found_inf` on the device
            found_inf=found_inf_of(self),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]) * group["adamw_lr_factor"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


Muon = MuonAdamW  # what configs and plan.json call it; torch's Muon has this name among the optimizers of a process


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Bring the singular values of a matrix near 1, by Newton and Schulz's iteration. [M, N] → [M, N]."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T.contiguous() if matrix.shape[0] > matrix.shape[1] else x


def update_scale(rows: int, columns: int, scale: str) -> float:
    """The factor of an orthogonal update of the whole matrix."""
    return 0.2 * math.sqrt(max(rows, columns)) if scale == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
