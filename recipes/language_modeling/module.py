"""The LightningModule: loss, exact evaluation and text samples. It knows no rank, strategy or launcher."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from lightning import LightningModule
from torch import Tensor, nn

from recipes.language_modeling import hugging_face
from recipes.language_modeling.data import TextData
from recipes.language_modeling.model import Transformer
from recipes.language_modeling.streams import StreamedText
from shardwise.data.tokenizer import ByteTokenizer, Tokenizer
from shardwise.errors import ConfigError, count
from shardwise.nn.generation import KeyValueCache, Sampling, continue_texts
from shardwise.nn.linear_cross_entropy import IGNORE, linear_cross_entropy, vocabulary_part_of
from shardwise.nn.numerics import ExactMean
from shardwise.protocols import kept_gathered, optional

Batch = dict[str, Tensor]
# What the model is given of packed documents, and its key in a batch
_DOCUMENTS = {"documents": "documents", "starts": "document_starts"}


class LanguageModel(LightningModule):
    """Next-token prediction; `sample_tokens` > 0 writes a sample of that many tokens at every validation."""

    evaluation: ExactMean  # over all sets that are evaluated
    evaluations: nn.ModuleList  # over each set that has a name
    loss_weight_unit = "tokens"  # the log's name for what loss_weight counts
    takes_documents = True
    sequence_tensors = ("tokens", "targets")
    whole_weights_in = ()  # no hook here looks at weights

    def __init__(self, model: Transformer, sample_prompt: str = "def ", sample_tokens: int = 0) -> None:
        super().__init__()
        if sample_tokens < 0:
            raise ConfigError(f"module.{sample_tokens=}: must be at least 0")
        self.model = model
        self.sample_prompt = sample_prompt
        self.sample_tokens = sample_tokens
        self.sample = ""
        self.loss_name = "full"

    @staticmethod
    def link_arguments(node: dict[str, Any], data: Any) -> dict[str, Any]:
        """The arguments, with `model.vocab_size` as large as the data's; asked for where the user does not give it."""
        model = node.get("model")
        tokens = data.vocab_size_to_be if isinstance(data, TextData) else getattr(data, "vocab_size", None)
        if not isinstance(model, Mapping) or not isinstance(tokens, int) or tokens <= model.get("vocab_size", tokens):
            return node
        return {**node, "model": {**model, "vocab_size": tokens}}

    @staticmethod
    def check_data(node: Mapping[str, Any], data: Any) -> None:
        """Refuses data with tokens or sequences that are too large for the model, before any rank starts."""
        sizes = {name: node["model"].get(name) for name in ("vocab_size", "max_seq_len")}
        if isinstance(data, TextData | StreamedText) and None not in sizes.values():
            data.check_fits(**sizes)

    @staticmethod
    def several_passes(node: Mapping[str, Any]) -> dict[str, Any] | None:
        """Without samples at validation there is one pass."""
        return {"sample_tokens": 0} if node.get("sample_tokens", 0) else None

    def setup(self, stage: str) -> None:
        """Refuses such data once more, since they may have been made only now. Says what no token uses."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, TextData | StreamedText):
            return
        data.check_fits(vocab_size=self.vocab_size, max_seq_len=self.model.max_seq_len)
        tokens = data.vocab_size or self.vocab_size
        if stage == "fit" and tokens < self.vocab_size and self.trainer.is_global_zero:
            rows = count(self.vocab_size - tokens, "row")
            print(f"model.vocab_size={self.vocab_size}: {rows} of no token, since the data has {tokens}", flush=True)
        trained, seen = data.sequence_length, self.model.max_seq_len
        if stage == "fit" and trained < seen and self.trainer.is_global_zero:
            print(
                f"the model sees up to {seen} tokens and is trained on {trained}: what it writes beyond is worse; "
                f"model.max_seq_len={trained} or data.sequence_length={seen} makes them equal",
                flush=True,
            )

    def choose_attention(self, name: str) -> None:
        """Compute attention with this kernel of `causal_attention`."""
        self.model.choose_attention(name)

    @staticmethod
    def hugging_face_names(node: Mapping[str, Any]) -> dict[str, str]:
        """Map the parameters of the module in `node` to those of LlamaForCausalLM."""
        return hugging_face.names(node)

    @staticmethod
    def hugging_face_config(node: Mapping[str, Any]) -> dict[str, Any]:
        """Make the config.json of the module in `node`."""
        return hugging_face.config(node)

    def init_module_weights(self, module: nn.Module) -> None:
        """Fills the weights of `module`, without its children, if it is a part of the model."""
        self.model.init_module_weights(module)

    def choose_loss(self, name: str) -> None:
        """Compute the loss in this way of `linear_cross_entropy`."""
        self.loss_name = name

    def loss_weight(self, batch: Batch) -> int:
        """The number of valid targets, which is the weight of the batch in its accumulation window."""
        return int((batch["targets"] != IGNORE).sum())

    def flops(self, batch: Batch) -> int:
        """The FLOPs of the batch's forward and backward, from its shape. Targets that do not count are included."""
        return self.model.training_flops(*batch["tokens"].shape)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Nats per valid target, averaged over the micro-batch."""
        total, tokens = self._loss(batch)
        return total / tokens.clamp(min=1)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Adds to the epoch's loss; the first batch also draws a sample."""
        self._evaluate(batch, dataloader_idx)
        if batch_idx == dataloader_idx == 0 and self.sample_tokens and not self.trainer.sanity_checking:
            # All ranks draw the same sample, since sharded weights are gathered from all of them.
            [self.sample] = self._samples([self._prompt()], seed=0)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Adds to the epoch's loss."""
        self._evaluate(batch, dataloader_idx)

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> list[str]:
        """The first 32 tokens of each sequence and what the model adds to them, as text."""
        return self._samples(batch["tokens"][:, :32].tolist(), seed=batch_idx)

    def on_validation_epoch_start(self) -> None:
        self._begin_evaluation(len(self.trainer.num_val_batches))
        self.sample = ""

    def on_test_epoch_start(self) -> None:
        self._begin_evaluation(len(self.trainer.num_test_batches))

    def on_train_start(self) -> None:
        path = Path(self.trainer.default_root_dir) / "samples.txt"
        if self.trainer.is_global_zero and path.exists():  # drop samples from after the checkpoint
            first, *samples = re.split(r"^(?==== step \d+$)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            kept = [text for text in samples if int(text.split(maxsplit=3)[2]) <= self.global_step]
            path.write_text("".join([first, *kept]), encoding="utf-8")

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("validation")
        if self.sample and self.trainer.is_global_zero:
            path = Path(self.trainer.default_root_dir) / "samples.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"=== step {self.global_step}\n{self.sample}\n")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""
        return self.model.vocab_size

    @property
    def context_length(self) -> int:
        """The tokens that the model sees at most."""
        return self.model.max_seq_len

    def make_cache(self, rows: int, length: int) -> KeyValueCache:
        """An empty cache for `rows` texts of at most `length` tokens."""
        return KeyValueCache(self.model.n_layers, rows, length)

    def next_token_logits(self, tokens: Tensor, lengths: list[int], cache: KeyValueCache) -> Tensor:
        """int64 [B, T], of which the first `lengths[b]` of row b count -> [B, V] after the last of these.

        The tokens are added to the cache.
        """
        cache.begin(tokens, lengths)
        hidden = self.model(tokens, cache)
        last = torch.tensor(lengths, device=tokens.device) - 1
        logits: Tensor = self.model.head(hidden[torch.arange(len(lengths), device=tokens.device), last])
        return logits

    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 0.8,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        vocab_size: int | None = None,
    ) -> Tensor:
        """int64 [B, T] -> [B, T + max_new_tokens], the new ones below `vocab_size`.

        `continue_texts` says what is forgotten when that is too long.
        """
        new = continue_texts(
            self,
            tokens.tolist(),
            max_new_tokens,
            Sampling(temperature, top_k),
            device=tokens.device,
            generator=generator,
            vocab_size=vocab_size,
        )
        return torch.cat((tokens, torch.tensor(list(new), device=tokens.device).view(-1, len(tokens)).T), dim=1)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The data's; bytes if it does not know and the model has 256 tokens; None: tokens are shown as numbers."""
        found: Tokenizer | None = optional(getattr(self.trainer, "datamodule", None), "tokenizer")
        return ByteTokenizer() if found is None and self.vocab_size == ByteTokenizer.vocab_size else found

    def _prompt(self) -> list[int]:
        """The tokens of `sample_prompt`; without any, the token that ends a document: another one begins behind it."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return [0]
        return tokenizer.encode([self.sample_prompt])[0] or [tokenizer.end_of_document]

    def _samples(self, prompts: list[list[int]], seed: int) -> list[str]:
        """Each prompt and `sample_tokens` more tokens, as text. Collective."""
        tokenizer, generator = self.tokenizer, torch.Generator(self.device).manual_seed(seed)
        with kept_gathered(self.trainer):
            tokens = self.generate(
                torch.tensor(prompts, device=self.device),
                self.sample_tokens or 32,
                generator=generator,
                vocab_size=None if tokenizer is None else tokenizer.vocab_size,
            ).tolist()
        return [" ".join(map(str, row)) if tokenizer is None else tokenizer.decode(row) for row in tokens]

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The summed loss in nats, and the number of valid targets."""
        targets = batch["targets"]
        documents = {name: batch[key] for name, key in _DOCUMENTS.items() if key in batch}
        hidden = self.model(batch["tokens"], **documents)
        head = self.model.head
        part = vocabulary_part_of(head)
        total = linear_cross_entropy(hidden, head.weight, targets, loss=self.loss_name, part=part)
        return total, (targets != IGNORE).sum()

    def _begin_evaluation(self, sets: int) -> None:
        data = getattr(self.trainer, "datamodule", None)
        self.set_names = [str(i) for i in range(sets)] if sets > 1 else []
        if isinstance(data, TextData):
            self.set_names = [name for name in data.validation_names if name]  # one without a name stands alone
        # The constructor may run on the meta device, which would leave the sums uninitialised.
        self.evaluation = ExactMean(self.device)
        self.evaluations = nn.ModuleList(ExactMean(self.device) for _ in self.set_names)

    def _evaluate(self, batch: Batch, number: int) -> None:
        """Add a batch of the set of this number."""
        total, tokens = self._loss(batch)
        for mean in (self.evaluation, *self.evaluations[number : number + 1]):
            cast(ExactMean, mean).update(total, tokens)

    def _log_evaluation(self, stage: str) -> None:
        self._log_loss(stage, self.evaluation)
        for name, mean in zip(self.set_names, self.evaluations, strict=True):
            self._log_loss(f"{stage}/{name}", cast(ExactMean, mean))

    def _log_loss(self, prefix: str, mean: ExactMean) -> None:
        loss = mean.compute()
        # All ranks have the same value already. sync_dist=True keeps Lightning from warning.
        self.log(f"{prefix}/loss", loss, sync_dist=True)
        self.log(f"{prefix}/bits_per_token", loss / math.log(2), sync_dist=True)
        self.log(f"{prefix}/perplexity", loss.exp(), sync_dist=True)
