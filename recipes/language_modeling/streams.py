"""Text that is no shards: it is read from a stream, and tokenised as it comes."""

from typing import Any

from lightning import LightningDataModule
from torch.utils.data import DataLoader

from recipes.language_modeling.data import check_at_least, check_sizes
from shardwise.data.document_stream import DocumentStream, open_document_stream
from shardwise.data.tokenizer import digest, load_tokenizer
from shardwise.data.tokens import TokenSequences, TokenShards, tokenizer_of
from shardwise.errors import ConfigError


class StreamedText(LightningDataModule):
    """Sequences of `sequence_length` tokens from `source`, an iterable of dicts whose `field` is a text.

    `tokenizer`, `end_of_document`: see `load_tokenizer`. Validation reads `validation_source`, a stream as well, or the
    validation split of the token shards in `validation_directory`.
    """

    def __init__(
        self,
        source: Any,
        sequence_length: int,
        batch_size: int,
        field: str = "text",
        tokenizer: str = "bytes",
        end_of_document: str | None = None,
        num_workers: int = 0,
        validation_source: Any = None,
        validation_directory: str | None = None,
    ) -> None:
        super().__init__()
        check_at_least(sequence_length, num_workers)
        if validation_source is not None and validation_directory is not None:
            raise ConfigError(
                "data.validation_source and data.validation_directory are both given: leave one of them out"
            )
        self.source, self.validation_source = source, validation_source
        self.validation_directory = validation_directory
        self.tokenizer = load_tokenizer(tokenizer, end_of_document)
        self.field, self.sequence_length = field, sequence_length
        self.batch_size, self.num_workers = batch_size, num_workers

    def check(self) -> None:
        """Raises `ConfigError` unless validation shards, if there are any, can be read and have this tokenizer."""
        if self.validation_directory is not None:
            self._validation_shards(self.validation_directory)

    @property
    def vocab_size(self) -> int:
        """Every token is below this number."""
        return self.tokenizer.vocab_size

    def check_fits(self, *, vocab_size: int, max_seq_len: int) -> None:
        """Raises `ConfigError` if the data hold tokens or sequences that a model of these sizes cannot take."""
        check_sizes(f"data.tokenizer={self.tokenizer.name}", self.tokenizer.vocab_size, self.sequence_length,
                    vocab_size, max_seq_len)  # fmt: skip

    def train_dataloader(self) -> DocumentStream:
        return self._stream(self.source, self.num_workers)

    def val_dataloader(self) -> DataLoader[Any]:
        if self.validation_directory is not None:
            return DataLoader(self._validation_shards(self.validation_directory), batch_size=self.batch_size)  # type: ignore[arg-type]
        if self.validation_source is None:
            raise ConfigError(
                "there is nothing to validate on: give data.validation_source._target_=…, data.validation_directory="
                "<token shards>, or max_validation_batches=0 for no validation"
            )
        # The text is read from its start each time, by one process, so that its order is always the same.
        return self._stream(self.validation_source, min(1, self.num_workers), keep_last=True)

    @property
    def has_held_out_data(self) -> bool:
        return self.validation_directory is not None or self.validation_source is not None

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    def _stream(self, source: Any, workers: int, *, keep_last: bool = False) -> DocumentStream:
        return open_document_stream(
            source, field=self.field, tokenizer=self.tokenizer, sequence_length=self.sequence_length,
            batch_size=self.batch_size, num_workers=workers, keep_last=keep_last,
        )  # fmt: skip

    def _validation_shards(self, directory: str) -> TokenSequences:
        made_with = tokenizer_of(directory)
        if made_with is not None and digest(made_with) != digest(self.tokenizer):
            raise ConfigError(
                f"data.validation_directory={directory} holds tokens of {made_with.name}, and data.tokenizer="
                f"{self.tokenizer.name}: they are not the same tokenizer; prepare the shards with this one"
            )
        return TokenSequences(TokenShards(directory, "validation"), self.sequence_length)
