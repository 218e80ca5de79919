"""Compact optimizer state, Muon's choice of matrices, and what is refused of both."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.checkpoint.optimizers import describe_optimizers, fill_names, optimizer_difference
from shardwise.distributed.dtensor import rows_of_ranks
from shardwise.errors import ConfigError
from shardwise.optim.adamw import AdamW8bit, AdamWBf16, dequantize, quantize, shares, table
from shardwise.optim.matrices import choose_matrices, describe_choice, muon_groups
from shardwise.optim.muon import Muon, orthogonalize
from shardwise.optim.optimizers import after_step, clip_by_norm, treats_weights_one_by_one
from shardwise.plan.optimizer import block_length
from shardwise.schedules import warmup_cosine, warmup_linear
from shardwise.trainer import steps_of_schedule

CPU = torch.device("cpu")
OURS: list[Any] = [AdamW8bit, AdamWBf16, Muon]


def test_the_shares_are_those_of_the_dynamic_table() -> None:
    """As bitsandbytes and torchao make it: decades of linearly spaced means, each with twice as many as the last."""
    for signed in (True, False):
        made = []
        for decade in range(7):
            edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
            means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
            made += [*means.tolist(), *((-means).tolist() if signed else [])]
        torch.testing.assert_close(
            torch.tensor(shares(signed)), torch.tensor(sorted([*made, 0.0, 1.0])), rtol=1e-12, atol=0
        )


def random_blocks(signed: bool) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200, 256, generator=generator) * torch.randn(200, 1, generator=generator).mul(8).exp()
    values[0], values[1, 1:] = 0.0, 0.0
    return values if signed else values.abs()


@pytest.mark.parametrize("signed", [True, False])
def test_numbers_that_were_kept_once_do_not_change_again(signed: bool) -> None:
    values, of = random_blocks(signed), table(signed, CPU)
    codes, scale = quantize(values, signed)
    read = dequantize(codes, scale, of, torch.float32)
    error = ((read - values).abs().amax(1) / values.abs().amax(1).clamp(min=1e-30)).max()
    assert error < 0.0075  # half of the widest step
    again, scale_again = quantize(read, signed)
    assert torch.equal(scale_again, scale) and torch.equal(dequantize(again, scale, of, torch.float32), read)
    largest = values.abs().argmax(1, keepdim=True)
    assert torch.equal(read.gather(1, largest), values.gather(1, largest)), "the largest is exact, whatever its sign"
    assert signed or ((read == 0) == (values == 0)).all(), "what AdamW divides by is not rounded to 0"


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_becomes_the_nearest_share(signed: bool) -> None:
    of = torch.tensor(shares(signed), dtype=torch.float64)
    between = torch.cat([of[:-1] + (of[1:] - of[:-1]) * x for x in (1e-6, 0.49999, 0.50001, 1 - 1e-6)])
    between = between.clamp(min=0.0 if not signed else -1.0)
    nearest = (between[:, None] - of).abs().argmin(1)
    if not signed:
        nearest = nearest.clamp(min=1)
    found, _ = quantize(torch.stack([between, torch.ones_like(between)], 1), signed)
    assert torch.equal(found[:, 0].long(), nearest)


@pytest.mark.parametrize(
    ("shape", "length"),
    [((8,), None), ((8, 4096), 256), ((64, 3, 7, 7), 147), ((5, 896), 224), ((8, 257), None), ((0, 256), 256),
     ((4, 0), None), ((4, 63), None)],
)  # fmt: skip
def test_blocks_divide_a_row(shape: tuple[int, ...], length: int | None) -> None:
    assert block_length(shape) == length


def steps(optimizer: Any, parameters: list[Tensor], gradients: list[list[Tensor]]) -> None:
    for step in gradients:
        for p, gradient in zip(parameters, step, strict=True):
            p.grad = gradient.clone()
        optimizer.step()


def drawn(*shape: int, count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def test_a_rank_with_some_rows_keeps_what_a_rank_with_all_keeps() -> None:
    start, *gradients = drawn(7, 128)
    whole = nn.Parameter(start.clone())
    optimizer = AdamW8bit([whole])
    steps(optimizer, [whole], [[g] for g in gradients])
    for rows in (slice(0, 4), slice(4, 7), slice(7, 7)):
        part = nn.Parameter(start[rows].clone())
        other = AdamW8bit([part])
        steps(other, [part], [[g[rows]] for g in gradients])
        assert torch.equal(part, whole[rows])
        for key, value in other.state[part].items():
            assert torch.equal(
                value, optimizer.state[whole][key] if key == "step" else optimizer.state[whole][key][rows]
            )


def test_the_memory_layout_changes_no_block() -> None:
    start, *gradients = drawn(6, 8, 3, 3)
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(start.clone().contiguous(memory_format=layout))
        steps(AdamW8bit([p]), [p], [[g] for g in gradients])
        ends.append(p.detach().contiguous())
    assert torch.equal(*ends)


@pytest.mark.parametrize(("kind", "most"), [(AdamW8bit, 2.04), (AdamWBf16, 4.01)])
def test_bytes_of_state(kind: Any, most: float) -> None:
    """A count of steps and the scales of the blocks come on top of 2 bytes, or 4; AdamW has 8."""
    parameters = [nn.Parameter(torch.randn(96, 512)), nn.Parameter(torch.randn(512))]
    optimizer = kind([parameters[0]])
    steps(optimizer, parameters[:1], [[torch.randn(96, 512)]])
    kept = sum(value.nbytes for value in optimizer.state[parameters[0]].values())
    assert kept / parameters[0].numel() < most


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWBf16])
def test_updates_stay_near_those_of_adamw(kind: Any) -> None:
    start, *gradients = drawn(32, 256, count=30)
    ends = []
    for made in (torch.optim.AdamW, kind):
        p = nn.Parameter(start.clone())
        steps(made([p], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1), [p], [[g] for g in gradients])
        ends.append(p.detach() - start)
    assert float((ends[1] - ends[0]).norm() / ends[0].norm()) < 0.03


def test_an_element_whose_gradient_vanishes_does_not_leap() -> None:
    """Its moment is tiny beside the others of its block. Where the second moment became 0, only eps would divide it."""
    p = nn.Parameter(torch.zeros(1, 256))
    optimizer = AdamW8bit([p], lr=1.0, weight_decay=0.0)
    gradient = torch.ones(1, 256)
    gradient[0, 0] = 2e-4
    steps(optimizer, [p], [[gradient]] * 10)
    before = p.detach().clone()
    gradient[0, 0] = 0.0
    steps(optimizer, [p], [[gradient]])
    assert float((p.detach() - before).abs().max()) < 1.5


@pytest.mark.parametrize("kind", OURS)
def test_a_step_that_does_not_count_changes_no_bit(kind: Any) -> None:
    matrix, vector = nn.Parameter(torch.randn(8, 64)), nn.Parameter(torch.randn(8))
    groups = [{"params": [matrix], "algorithm": "muon"}, {"params": [vector], "algorithm": "adamw"}]
    optimizer = kind(groups)
    steps(optimizer, [matrix, vector], [[torch.randn(8, 64), torch.randn(8)]] * 2)
    before = copy.deepcopy((matrix, vector, [optimizer.state[p] for p in (matrix, vector)]))
    optimizer.found_inf = torch.ones(())
    steps(optimizer, [matrix, vector], [[torch.full((8, 64), torch.nan), torch.full((8,), torch.inf)]])
    torch.testing.assert_close((matrix, vector, [optimizer.state[p] for p in (matrix, vector)]), before, rtol=0, atol=0)
    optimizer.found_inf = torch.zeros(())
    steps(optimizer, [matrix, vector], [[torch.randn(8, 64), torch.randn(8)]])
    assert not torch.equal(matrix, before[0]) and not torch.equal(vector, before[1])


@pytest.mark.parametrize("kind", OURS)
def test_state_is_made_as_the_first_step_makes_it(kind: Any) -> None:
    """A checkpoint is read into what `make_state` makes."""
    matrix, vector = nn.Parameter(torch.randn(8, 64)), nn.Parameter(torch.randn(8))
    optimizer = kind([{"params": [matrix], "algorithm": "muon"}, {"params": [vector], "algorithm": "adamw"}])
    steps(optimizer, [matrix, vector], [[torch.randn(8, 64), torch.randn(8)]])
    for p in (matrix, vector):
        made = optimizer.make_state(p)
        assert [(k, v.shape, v.dtype) for k, v in made.items()] == [
            (k, v.shape, v.dtype) for k, v in optimizer.state[p].items()
        ]


def test_a_second_moment_in_bf16_that_could_never_fall_is_refused() -> None:
    with pytest.raises(ValueError, match="use at most 0.996, or optimizer=adamw_8bit or adamw"):
        AdamWBf16([nn.Parameter(torch.zeros(1))], betas=(0.9, 0.999))
    AdamWBf16([nn.Parameter(torch.zeros(1))], betas=(0.9, 0.996))


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(0)), 5))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_rows_are_cut_as_torch_cuts_them() -> None:
    for rows in range(12):
        for ranks in range(1, 6):
            chunks = [len(part) for part in torch.arange(rows).chunk(ranks)] if rows else []
            assert rows_of_ranks(rows, ranks) == chunks + [0] * (ranks - len(chunks))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.frozen = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4).requires_grad_(False)
        self.kernel, self.depthwise = nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3, groups=4)
        self.positions = nn.Embedding(3, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.layers = nn.ModuleList(Layer() for _ in range(2))


def test_muon_has_the_matrices_of_layers_that_repeat() -> None:
    model = Model()
    chosen = choose_matrices(model, list(model.layers), "layers")
    assert chosen == {f"layers.{i}.{name}.weight" for i in range(2) for name in ("linear", "kernel")}
    assert describe_choice(model, chosen) == (
        "optimizer: Muon has 4 matrices, 49.0% of the trained parameters (layers.*.linear.weight, "
        "layers.*.kernel.weight); AdamW has the others, weights of 3 and more dimensions among them "
        "(layers.*.depthwise.weight)"
    )
    assert describe_choice(model.layers[0].linear, {"weight"}).endswith("parameters (weight); AdamW has the others")
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    divided = muon_groups(groups, [p for name, p in model.named_parameters() if name in chosen])
    assert [(g["algorithm"], g["weight_decay"]) for g in divided] == [("muon", 0.1), ("adamw", 0.1)]
    assert sum(len(g["params"]) for g in divided) == len(list(model.parameters()))


def test_muon_has_the_matrices_that_are_named() -> None:
    model = Model()
    assert choose_matrices(model, [], ["head.*", "layers.1.*"]) == {
        "head.weight", "layers.1.linear.weight", "layers.1.kernel.weight"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("layers", "Model has no matrix in a layer that repeats; name the layers, e.g. units=[Block], or the matrices"),
        (["*.norm.*"], "*.norm.* is the name of no matrix; there are head.weight, layers.0.linear.weight"),
        (["embedding.weight"], "embedding.weight is the name of no matrix"),
        ("head.weight", "must be layers, or a list of patterns of parameters' names"),
        ([], "must be layers, or a list of patterns of parameters' names"),
    ],
)
def test_a_choice_of_nothing_is_refused(which: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose_matrices(Model(), [], which)
    assert message in str(error.value)


def test_a_vector_is_no_matrix() -> None:
    with pytest.raises(ValueError, match="give vectors in a group with algorithm='adamw'"):
        Muon([nn.Parameter(torch.zeros(3))])


def test_state_of_another_choice_of_matrices_is_not_taken() -> None:
    def made(first: str, second: str) -> Muon:
        groups = [(first, a), (second, b)]
        return Muon([{"params": [p], "algorithm": algorithm} for algorithm, p in groups])

    a, b = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))
    names = [[["a"], ["b"]]]
    saved = describe_optimizers([made("muon", "adamw")], names, {}, whole=True)
    assert optimizer_difference(saved, [made("muon", "adamw")], names) is None
    before = [saved[0] | {"kind": "Muon"}]  # as it was called
    assert optimizer_difference(before, [made("muon", "adamw")], names) is None
    torchs = describe_optimizers([torch.optim.Muon([a, b])], [[["a", "b"]]], {}, whole=True)
    assert optimizer_difference(torchs, [made("muon", "adamw")], names) is not None
    assert optimizer_difference(saved, [made("adamw", "adamw")], names) == "a: trained by muon before, and by adamw now"


def test_an_older_checkpoint_that_lacks_names_gets_those_of_its_groups() -> None:
    saved: list[dict[str, Any]] = [{"groups": [{"names": ["a"]}, {"names": []}]}]
    fill_names(saved, [[["a", "b"], ["c"]]])
    assert [group["names"] for group in saved[0]["groups"]] == [["a", "b"], ["c"]]
    whole: list[dict[str, Any]] = [{"groups": [{"names": ["a"]}], "made": [["a"]]}]
    fill_names(whole, [[["a", "b"]]])
    assert whole[0]["groups"] == [{"names": ["a"]}], "a newer one has them all"


def with_gradients(dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], Tensor]:
    """Parameters with gradients, and the norm of these."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in ((5, 3), (7,))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return parameters, torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


@pytest.mark.parametrize("share", [0.3, 2.0])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_step_clips_as_a_pass_of_its_own_does(make: Any, share: float) -> None:
    found = []
    for within in (True, False):
        parameters, norm = with_gradients()
        optimizer = make(parameters, lr=0.1, fused=True)
        gradients = [p.grad for p in parameters if p.grad is not None]
        before = [gradient.clone() for gradient in gradients]
        clip_by_norm(gradients, norm, share * float(norm), optimizer if within else None)
        assert not within or all(map(torch.equal, before, gradients))
        optimizer.step()
        after_step(optimizer)
        assert "grad_scale" not in vars(optimizer)
        found.append([*(p.detach() for p in parameters), *(p.grad for p in parameters)])
    assert all(map(torch.equal, found[0], found[1]))  # a rank with a hook must stay equal to the others


def test_what_a_fused_step_cannot_do_or_others_would_see_is_clipped_at_once() -> None:
    def clipped(
        dtype: torch.dtype, make: Any, hook: bool = False, norms: torch.dtype | None = None, **options: Any
    ) -> bool:
        parameters, norm = with_gradients(dtype)
        optimizer = make(parameters, lr=0.1, **options)
        if hook:
            optimizer.register_step_pre_hook(lambda *_: None)
        gradients = [p.grad for p in parameters if p.grad is not None]
        clip_by_norm(gradients, norm.to(norms or dtype), 1.0, optimizer)
        return float(torch.nn.utils.get_total_norm(gradients)) < 1.01

    class Own(torch.optim.AdamW):
        """It may look at the gradients in its step."""

    class Wrapper(torch.optim.Optimizer):
        """Around another optimizer, without the set-up of its base class."""

        def __init__(self, parameters: Any, lr: float) -> None:
            self.inner = torch.optim.AdamW(parameters, lr=lr, fused=True)

    assert not clipped(torch.float32, torch.optim.AdamW, fused=True)
    assert clipped(torch.float32, Wrapper)
    assert clipped(torch.float32, torch.optim.AdamW)
    assert clipped(torch.float64, torch.optim.AdamW, fused=True)
    assert clipped(torch.float32, torch.optim.AdamW, norms=torch.float64, fused=True)  # a stage with other dtypes
    assert clipped(torch.float32, torch.optim.SGD, fused=True)
    assert clipped(torch.float32, Own, fused=True)
    assert clipped(torch.float32, torch.optim.AdamW, hook=True, fused=True)


def test_a_step_that_only_calls_torchs_is_elementwise() -> None:
    class Calls(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            """Of others' code: nothing of its own."""
            return super().step(closure)

    class Sets(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["lr"] = 0.5
            return super().step(closure)

    class CallsWhatSets(Sets):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Hides(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            _ = [p.zero_() for p in self.state]
            return loss

    class NeedsWholes(torch.optim.LBFGS):
        def step(self, closure: Any) -> Any:
            return super().step(closure)

    found = {Calls: True, Sets: False, CallsWhatSets: False, Hides: False, NeedsWholes: False, torch.optim.SGD: True}
    for _ in range(2):  # torch wraps the step of a class when it makes the first optimizer of it
        for kind, elementwise in found.items():
            made: Any = kind
            assert treats_weights_one_by_one(made([torch.nn.Parameter(torch.zeros(1))], lr=0.1)) is elementwise, kind


def test_a_warm_up_is_a_share_of_all_steps_rounded_up() -> None:
    for schedule in (warmup_cosine, warmup_linear):
        for step in range(50):
            assert schedule(step, 50, warmup_ratio=0.05) == schedule(step, 50, 3)


def test_a_schedule_for_data_of_unknown_length_is_refused_in_words() -> None:
    plan: Any = SimpleNamespace(schedule={"_target_": "a.cosine"}, max_steps=None, max_epochs=5)
    for unknown in (-1, float("inf")):
        module: Any = SimpleNamespace(trainer=SimpleNamespace(max_steps=-1, estimated_stepping_batches=unknown))
        with pytest.raises(ConfigError, match="give max_steps=N in place of max_epochs=5, or schedule=none"):
            steps_of_schedule(plan, module)
