"""The description of a checkpoint's tensors, read without running code from it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
)

from shardwise.errors import ConfigError
from shardwise.run_dir.files import TENSORS
from shardwise.run_dir.reading import inside, open_regular

_PATHS = {"Path", "PosixPath", "PurePosixPath"}
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, (torch.dtype, torch.layout))}
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}  # fmt: skip


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()) and "." not in name:  # a dotted name reaches into what a module imports
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata asks for {module}.{name}, which no checkpoint needs")


def read_metadata(folder: Path) -> Metadata:
    """The description of a checkpoint's tensors.

    Raises:
        ConfigError: it is damaged, asks for what no checkpoint needs, or names files outside of the checkpoint.
    """
    try:
        with open_regular(folder / TENSORS) as file:
            metadata = _Metadata(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f"it holds a {type(metadata).__name__}")
        for name in {info.relative_path for info in (metadata.storage_data or {}).values()}:
            inside(folder, name)
    except OSError:
        raise
    except Exception as error:  # whatever a stream of bytes makes an unpickler do
        raise ConfigError(
            f"{folder / TENSORS} cannot be read ({error or type(error).__name__}); give another checkpoint"
        ) from None
    return metadata
