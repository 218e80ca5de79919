"""Models of timm, by their names."""

from importlib import import_module
from typing import Any

from torch import nn

from shardwise.errors import ConfigError, did_you_mean


def timm_model(
    name: str,
    num_classes: int,
    in_channels: int = 3,
    image_size: int | None = None,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """A model of timm with fresh weights and a head for `num_classes`. Pretrained weights come by `init_from=`.

    `image_size`: for models that are made for one size, such as vision transformers. `options`: more arguments of
    `timm.create_model`.
    """
    try:
        timm = import_module("timm")
    except ImportError as error:
        raise ConfigError(
            f"model=timm needs timm, which cannot be imported ({error}): pip install timm, and the torchvision that "
            f"belongs to this torch (pytorch.org lists them)"
        ) from error
    if not timm.is_model(name):
        raise ConfigError(f"model.name={name}: timm has no model of this name{did_you_mean(name, timm.list_models())}")
    arguments = {"num_classes": num_classes, "in_chans": in_channels, **(options or {})}
    model: Any = timm.create_model(name, **arguments)
    if hasattr(getattr(model, "patch_embed", None), "img_size") and image_size is not None:
        model = timm.create_model(name, img_size=image_size, **arguments)
    model.in_channels = in_channels
    return model  # type: ignore[no-any-return]
