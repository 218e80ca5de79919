"""What a module, its data and its optimizer may define beyond Lightning.

All of it is optional. A user's class needs none of these as a base class: a method or attribute of the name is enough.
Every other file asks here whether it is there, mostly by `optional`. recipes/README.md says the same for users.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Module(Protocol):
    """Of a LightningModule."""

    loss_weight_unit: str
    """What `loss_weight` counts, in the log: "tokens", say."""

    takes_documents: bool
    """It keeps attention inside `batch["documents"]`, the number of each token's document: see docs/data.md."""

    sequence_tensors: tuple[str, ...]
    """The keys of the batch's tensors [sequences, positions, …] of which a rank gets its part of the positions, under
    context parallelism; the others come whole. With it a module says that a position reaches others through
    `causal_attention` alone, and that it takes its positions from the layout: see docs/parallelism.md."""

    whole_weights_in: tuple[str, ...]
    """The hooks of this module (or callback) in which strategies that shard weights make them whole. Without it they
    are whole in hooks of a run, an epoch, a validation and a checkpoint. `whole_weights_in=` on the command line goes
    before it."""

    channels_last: bool
    """Convolutions get images in channels-last layout. Under `ddp` their weights take that layout too."""

    def loss_weight(self, batch: Any) -> int:
        """How much a micro-batch counts, such as its samples or its valid tokens. Then the gradient is that of the mean
        over the whole global batch, also when micro-batches hold different amounts."""

    def flops(self, batch: Any) -> int:
        """Operations of a forward and a backward pass over a micro-batch. May look at shapes alone: it is called while
        the device computes."""

    def init_module_weights(self, layer: Any) -> None:
        """Initialise the parameters that `layer` itself owns. Then the module is built without memory for its
        parameters, and a model may be larger than the memory of a host. A module that cannot do so with the model that
        it was given sets it to None in `__init__`, and is built anew in memory."""

    head_name: str | None
    """The name of the layer that gives what is learned here, `model.fc`, say. `init_from=` takes files without it, or
    with one of other shapes: it then keeps its initial values. `freeze=backbone` is everything but it."""

    def choose_loss(self, name: str) -> None:
        """Compute the loss as `loss=` says: "full", "chunked" or "fused" of nn/linear_cross_entropy.py. Called once,
        before the module is set up. For `loss=auto` logits are counted by `vocab_size` and `max_seq_len` among the
        arguments of the module, or of its argument `model`."""

    @staticmethod
    def hugging_face_names(node: dict[str, Any]) -> dict[str, str]:
        """This model's names of weights → Hugging Face's. `node`: the module's in the config."""

    @staticmethod
    def hugging_face_config(node: dict[str, Any]) -> dict[str, Any]:
        """The content of Hugging Face's config.json. `node`: the module's in the config."""

    @staticmethod
    def check_data(node: dict[str, Any], data: Any) -> None:
        """Look whether the model fits the data, before any rank starts. `node`: the module's in the config.

        Raises:
            ConfigError: it does not."""

    @staticmethod
    def several_passes(node: dict[str, Any]) -> dict[str, Any] | str | None:
        """The arguments without which a step of the module would run more than once through its layers, to generate
        text say: a pipeline, which makes one pass in a step, gives them, and says so. Or why the pipeline is refused,
        as text; None: no step does. `node`: the module's in the config."""

    @staticmethod
    def link_arguments(node: dict[str, Any], data: Any) -> dict[str, Any]:
        """As LightningCLI's: `node`, the module's in the config, with the arguments that follow from the data, where
        the user gives none."""

    def choose_attention(self, name: str) -> None:
        """Compute attention with this kernel, a word of `attention=`, or "sdpa", which leaves the choice to torch:
        `causal_attention` of nn/attention.py takes it. Called once, before the module is set up. The size of its heads
        is `dim` / `n_heads` of the arguments of the module, or of its argument `model`."""

    tensor_parallel_layers: dict[str, str]
    """How `strategy.tensor_parallel_size=N` divides the layers, for the module itself or any of its parts: names of
    layers, with * for one part of a name → "column", "column_in_groups", "row", "embedding", "embedding_by_sample",
    "head", "gather" or "norm". recipes/README.md says what each means."""

    # A module with these four can continue texts: `shardwise generate`, nn/generation.py.

    vocab_size: int
    """How many tokens the model knows: every token is below."""

    context_length: int
    """The tokens that the model sees at most."""

    def make_cache(self, rows: int, length: int) -> Any:
        """What `next_token_logits` keeps between its calls, for `rows` texts of at most `length` tokens each."""

    def next_token_logits(self, tokens: Any, lengths: list[int], cache: Any) -> Any:
        """The next tokens of each text, int64 [B, T], of which the first `lengths[b]` of row b count → the logits
        [B, vocab_size] after the last of these. They come after the tokens of earlier calls with this cache."""


_CONTINUES_TEXTS = ("vocab_size", "context_length", "make_cache", "next_token_logits")


class Data(Protocol):
    """Of a LightningDataModule."""

    def check(self) -> None:
        """Look at files before any rank starts.

        Raises:
            DataError: what is wrong with them.
        """

    tokenizer: Any
    """The tokenizer that made its tokens (`Tokenizer` of data/tokenizer.py), or None. Its files go into the run's
    folder and into its checkpoints. It is asked for after `setup`."""

    has_held_out_data: bool
    """Whether there are samples for stages other than training. It is asked for after `setup`; without it there are."""

    def baselines(self) -> dict[str, float]:
        """Losses to draw beside the run's curve: of a model that only counts, say."""


class Samples(Protocol):
    """Of a data set whose samples have indices."""

    def draw_for_run(self, seed: int, positions: Any) -> Any:
        """The indices of the samples at `positions` of a run, both int64 arrays. It replaces the loader's order, and
        has to be a function of its arguments alone. The run may be longer than the data set: then some come again."""

    def progress_of_run(self, seed: int, samples: int) -> dict[str, float]:
        """Numbers for the log when a run has taken `samples` samples: how often each part was repeated, say."""

    def notices_for_run(self, samples: int | None) -> list[str]:
        """Lines for the user before training. `samples`: how many the run will take; None: that is not known."""

    def identity_of_data(self) -> dict[str, str]:
        """What the samples are, in words by name. A run that goes on with another identity is refused. A later version
        of the class may append a part after "; ", which is not compared with a checkpoint that lacks it."""


class Optimizer(Protocol):
    """Of a torch.optim.Optimizer."""

    is_elementwise: bool
    """It treats every weight by itself, without rows or columns, so that it may be given any pieces of a parameter."""

    is_rowwise: bool
    """It treats every row of a parameter (what the first dimension counts) by itself, so that it may be given some."""

    kept_by_rows: tuple[str, ...]
    """The keys of its state whose tensors have not the form of the parameter, but its rows: their first dimension is
    the parameter's, and with a row of the parameter goes a row of them."""

    reads_found_inf: bool
    """Its step changes nothing where the tensor `found_inf`, an attribute that it is given, is not 0. So the device
    alone needs to know whether the step counts, and the host does not wait. (torch's fused optimizers do so.)"""

    def use_matrices(self, matrices: Any) -> None:
        """It needs whole matrices, and computes with these from now on: `Matrices` of optim/matrices.py."""

    def make_state(self, parameter: Any) -> dict[str, Any]:
        """What it keeps for a parameter before its first step: a checkpoint is read into these tensors."""


class Logger(Protocol):
    """Of a Lightning logger."""

    rows_are_steps: bool
    """A number that belongs to no step of the run is not given to it."""

    def leaves(self) -> None:
        """The run ends in the middle, at the wish of a signal, and may go on."""


class Weights(Protocol):
    """What a module may ask of `trainer.strategy.weights`."""

    def whole(self) -> AbstractContextManager[Any]:
        """Inside, each weight is a whole tensor in fp32 (under ZeRO in low precision: in 16 bits), which may be
        written. Under zero1, zero2 and zero3 writes into trained weights are refused. Collective."""

    def kept_gathered(self) -> AbstractContextManager[Any]:
        """Inside, forward passes without gradients find all weights gathered, where memory suffices: many short ones
        would gather them again each time. Weights must not be written. Collective."""


_METHODS = {
    name
    for kind in (Module, Data, Samples, Optimizer, Logger, Weights)
    for name, value in vars(kind).items()
    if not name.startswith("_") and (callable(value) or isinstance(value, staticmethod))
}


def optional(owner: Any, name: str) -> Any:
    """What a user's object, or its class, has by this name of the classes above. None: nothing, or no method where the
    name is a method's."""
    found = getattr(owner, name, None)
    return found if name not in _METHODS or callable(found) else None


def loss_weight_unit_of(module: Any) -> str:
    return str(getattr(module, "loss_weight_unit", "targets"))


def flops_of(module: Any) -> Callable[[Any], int] | None:
    found: Callable[[Any], int] | None = optional(module, "flops")
    return found


def sequence_tensors_of(module: Any) -> tuple[str, ...]:
    return tuple(optional(module, "sequence_tensors") or ())


def wants_channels_last(module: Any) -> bool:
    return bool(optional(module, "channels_last"))


def initializes_itself(module: Any) -> bool:
    """Of a module or its class."""
    return optional(module, "init_module_weights") is not None


def no_split_modules_of(layer: Any) -> set[str]:
    """The class names of the layers that repeat, where a module says them as Hugging Face's do."""
    return set(optional(layer, "_no_split_modules") or ())


def lacks_to_continue_texts(module_class: Any) -> list[str]:
    """What a module's class lacks in order to continue texts; empty: nothing. Names that `__init__` sets are not
    known of a class, so that an attribute counts if the methods are there."""
    missing = [name for name in _CONTINUES_TEXTS if not hasattr(module_class, name)]
    return missing if {"make_cache", "next_token_logits"} & set(missing) else []


def tensor_plan_of(layer: Any) -> dict[str, str] | None:
    """How a Hugging Face model says that its layers are divided: names, with * for one part → styles."""
    found = getattr(type(layer), "tp_plan", None)
    return layer.tp_plan if isinstance(found, property) else None


def gathered_weights(module: Any) -> AbstractContextManager[Any]:
    """`Weights.whole` of a LightningModule that is trained; nothing under a strategy of another package."""
    weights: Weights | None = getattr(module.trainer.strategy, "weights", None)
    return nullcontext() if weights is None else weights.whole()


def kept_gathered(trainer: Any) -> AbstractContextManager[Any]:
    """`Weights.kept_gathered` of a Trainer; nothing under a strategy of another package."""
    weights: Weights | None = getattr(trainer.strategy, "weights", None)
    return nullcontext() if weights is None else weights.kept_gathered()


def state_maker_of(optimizer: Any) -> Callable[[Any], dict[str, Any]] | None:
    found: Callable[[Any], dict[str, Any]] | None = optional(optimizer, "make_state")
    return found


def rows_are_steps(logger: Any) -> bool:
    return bool(optional(logger, "rows_are_steps"))
