"""The data of several corpora, from which a run takes its samples by weight."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch.utils.data import Dataset

from recipes.language_modeling.data import TextData, check_names
from shardwise.data.mixture import Mixture
from shardwise.data.tokens import TokenShards
from shardwise.errors import ConfigError, did_you_mean

_OPTIONS = ("directory", "weight", "validation")


class MixtureData(TextData):
    """Sequences of `sequence_length` tokens from several folders of token shards.

    `corpora`: by name the `directory` of each, and its `weight`: how many samples come from it, in any unit. Each
    corpus's validation split is a validation set of its own, unless its `validation` is false, or `validation` names
    others. `TextData` describes the other arguments.
    """

    def __init__(
        self,
        corpora: Mapping[str, Mapping[str, Any]],
        sequence_length: int,
        batch_size: int,
        num_workers: int = 0,
        max_validation_sequences: int | None = None,
        document_mask: bool = False,
        validation: Mapping[str, str] | None = None,
    ) -> None:
        check_names("data.corpora", corpora)
        for name, corpus in corpora.items():
            _check_corpus(f"data.corpora.{name}", corpus)
        _check_distinct({name: Path(corpus["directory"]) for name, corpus in corpora.items()})
        super().__init__(
            next(iter(corpora.values()))["directory"], sequence_length, batch_size, num_workers, None,
            max_validation_sequences, document_mask, validation,
        )  # fmt: skip
        self.corpora = {name: Path(corpus["directory"]) for name, corpus in corpora.items()}
        self.weights = {name: float(corpus["weight"]) for name, corpus in corpora.items()}
        if validation is None:
            measured = {name for name, corpus in corpora.items() if corpus.get("validation", True)}
            self.validation_directories = {name: self.corpora[name] for name in self.corpora if name in measured}
        if not self.validation_directories:
            raise ConfigError(
                "data.corpora: validation is false for every corpus: leave it out for one that has a validation split, "
                "or name a folder with data.validation={name: directory}"
            )

    def directories(self) -> dict[str, Path]:
        """All folders of shards that are read, by the option that names them."""
        named = super().directories()
        del named["data.directory"]
        return {f"data.corpora.{name}": directory for name, directory in self.corpora.items()} | named

    def training_directories(self) -> list[Path]:
        """The folders whose train split is read."""
        return list(self.corpora.values())

    def _train(self) -> Dataset[Any]:
        corpora = {name: self._sequences(TokenShards(folder, "train")) for name, folder in self.corpora.items()}
        return cast(Dataset[Any], Mixture(corpora, self.weights))


def _check_corpus(option: str, corpus: Any) -> None:
    """Refuse a corpus without a directory or with a weight that is none.

    Raises:
        ConfigError: what is wrong with it.
    """
    if not isinstance(corpus, Mapping) or not {"directory", "weight"} <= set(corpus):
        raise ConfigError(f"{option}={corpus}: a corpus has a directory and a weight, {{directory: data/a, weight: 1}}")
    for key in corpus:
        if key not in _OPTIONS:
            raise ConfigError(f"{option}.{key}: a corpus has {', '.join(_OPTIONS)}{did_you_mean(str(key), _OPTIONS)}")
    weight = corpus["weight"]
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= sys.float_info.max:
        raise ConfigError(
            f"{option}.weight={weight}: a weight is a number above 0; leave the corpus out to read none of it"
        )
    if not isinstance(corpus["directory"], str) or not corpus["directory"]:
        raise ConfigError(f"{option}.directory={corpus['directory']}: name the folder of its token shards")
    if not isinstance(corpus.get("validation", True), bool):
        raise ConfigError(
            f"{option}.validation={corpus['validation']}: true measures its validation split, false leaves it out"
        )


def _check_distinct(directories: Mapping[str, Path]) -> None:
    first: dict[Path, str] = {}
    for name, directory in directories.items():
        if (other := first.setdefault(directory.resolve(), name)) != name:
            raise ConfigError(
                f"data.corpora.{name} and data.corpora.{other} are both {directory}: name it once, with the sum of "
                f"their weights"
            )
