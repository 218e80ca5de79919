"""What keeping documents apart costs: layers of Llama 3.2 1B over packed sequences, with the mask and without it.

    python benchmarks/document_mask.py                             on one GPU: two to three minutes
    python benchmarks/document_mask.py --out $OUT/benchmarks/results --commit 0123abc    where the code is a copy
    python benchmarks/document_mask.py --accelerator cpu --tiny    tries it out anywhere

Each contender runs the same forward and backward passes in bf16, in turn with the others: without documents, with the
kernel that the recipe uses on a GPU (torch's variable-length attention), with a boolean mask (what the recipe uses
elsewhere), and with flex_attention (attention=flex). Documents have random lengths of a given mean, and every step has
others. Writes benchmarks/results/document-mask-<gpu>.json after every part.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.device import device_of, peaks_gib, wait_for  # noqa: E402
from benchmarks.harness.observed import start_afresh  # noqa: E402
from recipes.language_modeling import model as recipe  # noqa: E402
from shardwise.nn import attention  # noqa: E402

NONE, VARLEN, MASK, FLEX = "no documents", "variable-length kernel", "boolean mask", "flex_attention"


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured."""

    dim: int = 2048
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 8192
    layers: int = 8
    length: int = 8192
    batch: int = 2
    means: tuple[int, ...] = (256, 1024, 8192)  # tokens a document; the last: nearly every sequence is one document
    warm_up: int = 3
    timed: int = 6
    rounds: int = 3
    limit_seconds: int = 90


TINY = Size(dim=64, heads=4, kv_heads=2, ffn=96, layers=2, length=128, means=(16, 128), warm_up=1, timed=2, rounds=2)


def make_batches(size: Size, mean: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Four batches of tokens in documents, whose lengths are those between points drawn evenly."""
    generator, batches = torch.Generator().manual_seed(mean), []
    for _ in range(4):
        begins = torch.rand(size.batch, size.length, generator=generator) < 1 / mean
        documents = begins.long().cumsum(1)
        tokens = torch.randint(0, 1024, (size.batch, size.length), generator=generator)
        starts = attention.document_starts(documents)
        batches.append({"tokens": tokens.to(device), "documents": documents.to(device), "starts": starts.to(device)})
    return batches


class Contenders:
    """One model, and what differs between the contenders."""

    def __init__(self, size: Size, device: torch.device, dtype: torch.dtype, compiled: bool) -> None:
        torch.manual_seed(0)
        self.size, self.device = size, device
        with torch.device(device):
            self.model = recipe.Transformer(
                1024, size.dim, size.layers, size.heads, size.kv_heads, size.ffn, size.length
            ).to(dtype)
        if compiled:
            for block in self.model.blocks:
                block.forward = torch.compile(block.forward)  # as compile=layer does
        self.direction = torch.randn(size.dim, generator=torch.Generator().manual_seed(0)).to(device)

    @property
    def names(self) -> list[str]:
        return [NONE, VARLEN, MASK, FLEX] if self.device.type == "cuda" else [NONE, MASK]

    def step(self, name: str, batch: dict[str, Tensor]) -> Tensor:
        """Forward and backward; the hidden states."""
        documents = {} if name == NONE else {key: batch[key] for key in ("documents", "starts")}
        self.model.choose_attention("flex" if name == FLEX else attention.SDPA)
        with patch.object(attention, "runs_varlen", lambda *_: name == VARLEN):
            hidden: Tensor = self.model(batch["tokens"], **documents)
            # Not the mean square itself: the last norm keeps it constant, so that its gradient would be rounding alone.
            (hidden.float() @ self.direction).square().mean().backward()
        return hidden.detach()

    def measure(self, name: str, batches: list[dict[str, Tensor]]) -> list[float]:
        """Tokens a second, in each round."""
        rates = []
        for _ in range(self.size.rounds):
            wait_for(self.device)
            begin = time.perf_counter()
            for i in range(self.size.timed):
                self.step(name, batches[i % len(batches)])
                self.model.zero_grad()
            wait_for(self.device)
            rates.append(self.size.timed * self.size.batch * self.size.length / (time.perf_counter() - begin))
        return rates


def compare(size: Size, device: torch.device, name: str, mean: int, compiled: bool) -> dict[str, Any]:
    contenders, batches = Contenders(size, device, torch.bfloat16, compiled), make_batches(size, mean, device)
    for i in range(max(size.warm_up, len(batches) if compiled else 0)):
        contenders.step(name, batches[i % len(batches)])
    contenders.model.zero_grad()
    rates = contenders.measure(name, batches)
    documents = sum(len(batch["starts"]) - 1 for batch in batches) / len(batches) / size.batch
    return {"tokens_per_second": median(rates), "rounds": rates, "documents_per_sequence": documents,
            **peaks_gib(device)}  # fmt: skip


def exactness(size: Size, device: torch.device, mean: int) -> dict[str, Any]:
    """The largest difference from the boolean mask in fp32, over the largest number there: of the hidden states, and of
    the gradient of the first layer's queries."""
    size = dataclasses.replace(size, layers=2, batch=1)
    batch = make_batches(size, mean, device)[0]
    found: dict[str, Any] = {}
    reference: tuple[Tensor, Tensor] | None = None
    for name, dtype in [(MASK, torch.float32), *((n, torch.bfloat16) for n in (MASK, VARLEN, FLEX, NONE))]:
        contenders = Contenders(size, device, dtype, compiled=False)
        if name not in contenders.names:
            continue
        hidden = contenders.step(name, batch).float()
        gradient = contenders.model.blocks[0].attention.wq.weight.grad.float()
        if reference is None:
            reference = hidden, gradient
            continue
        pairs = zip((hidden, gradient), reference, strict=True)
        found[name] = [float((ours - exact).abs().max() / exact.abs().max()) for ours, exact in pairs]
    return {"hidden_and_gradient": found}


def words_of(row: dict[str, Any]) -> str:
    if "hidden_and_gradient" in row:
        return str({name: [f"{value:.2g}" for value in pair] for name, pair in row["hidden_and_gradient"].items()})
    peak = f", {row['peak_allocated_gib']:.1f} GiB" if "peak_allocated_gib" in row else ""
    return f"{row['tokens_per_second']:,.0f} tokens/s, {row['documents_per_sequence']:.1f} documents a sequence{peak}"


def head_of(arguments: argparse.Namespace, size: Size, environment: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": results.command(),
        "environment": environment,
        "tiny": arguments.tiny,
        "size": json.loads(json.dumps(dataclasses.asdict(size))),
        "definitions": {
            "tokens_per_second": "of forward and backward through the layers, the median of the rounds",
            "hidden_and_gradient": " ".join((exactness.__doc__ or "").split()),
        },
        "sections": {},
    }


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--tiny", action="store_true", help="sizes for trying it out on a CPU")
    parser.add_argument("--only", default="", help="a regular expression: parts to measure; the others stay")
    arguments = parser.parse_args()
    size, device = TINY if arguments.tiny else Size(), device_of(arguments.accelerator)
    environment, name = results.measured_on(arguments.accelerator, arguments.commit)
    commit = environment.pop("commit")
    parts = results.Parts(
        arguments.out / f"document-mask-{name}.json", head_of(arguments, size, environment), words=words_of,
        limit_seconds=size.limit_seconds, commit=commit, only=arguments.only, prepare=lambda: start_afresh(device),
    )  # fmt: skip
    parts.part("exactness", "against fp32", lambda: exactness(size, device, size.means[0]))
    for mean, compiled in [*((mean, False) for mean in size.means), (size.means[-2], True)]:
        for one in [NONE, VARLEN, MASK, FLEX] if device.type == "cuda" else [NONE, MASK]:
            section = f"compile={'layer' if compiled else 'none'}, {mean} tokens a document"
            parts.part(section, one, lambda o=one, m=mean, c=compiled: compare(size, device, o, m, c))  # type: ignore[misc]
    parts.end()


if __name__ == "__main__":
    main()
