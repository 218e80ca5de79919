"""ResNet (torchvision's parameter names) and a vision transformer (timm's): images [B, C, H, W] to logits [B, classes].

Constructors never read or write a parameter's values, which may not be there yet: see `init_module_weights`.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.nn.numerics import no_autocast_in_16_bits


class LastBatchNorm(nn.BatchNorm2d):
    """Ends a residual branch. Its scale starts at 0, so that every block starts as the identity."""


class BasicBlock(nn.Module):
    """Two 3×3 convolutions: the repeated layer of ResNet-18 and -34."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = conv(channels, channels, 3)
        self.bn2 = LastBatchNorm(channels)
        self.downsample = shortcut(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_channels, H, W] -> [B, channels, H / stride, W / stride]."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x), inplace=True)


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1: the repeated layer of ResNet-50 and deeper. The 3×3 has the stride (v1.5)."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = conv(channels, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = conv(channels, channels * self.expansion, 1)
        self.bn3 = LastBatchNorm(channels * self.expansion)
        self.downsample = shortcut(in_channels, channels * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_channels, H, W] -> [B, 4 * channels, H / stride, W / stride]."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x), inplace=True)


BLOCKS: dict[str, type[BasicBlock] | type[Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}


class ResNet(nn.Module):
    """Stages of `layers` blocks, each twice as wide and half as large as the one before; ResNet-50 by default."""

    image_size: int | None = None  # any

    def __init__(
        self,
        num_classes: int,
        layers: Sequence[int] = (3, 4, 6, 3),
        block: str = "bottleneck",
        width: int = 64,
        in_channels: int = 3,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        if block not in BLOCKS:
            raise ConfigError(f"{block=} must be one of {', '.join(BLOCKS)}")
        if not layers or min(layers) < 1:
            raise ConfigError(f"layers={list(layers)}: at least one stage of at least one block; ResNet-50 is 3,4,6,3")
        self.num_classes, self.in_channels = num_classes, in_channels
        # small_images: a 32×32 image would be 8×8 after the usual stem, before the first block.
        self.conv1 = conv(in_channels, width, 3) if small_images else conv(in_channels, width, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        self.stages: list[str] = []
        channels_in = width
        for number, depth in enumerate(layers):
            channels, blocks = width * 2**number, nn.Sequential()
            for i in range(depth):
                stride = 2 if number > 0 and i == 0 else 1
                blocks.append(BLOCKS[block](channels_in, channels, stride))
                channels_in = channels * BLOCKS[block].expansion
            self.stages.append(f"layer{number + 1}")
            self.add_module(self.stages[-1], blocks)
        self.fc = nn.Linear(channels_in, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """[B, in_channels, H, W] -> [B, num_classes]."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(images)), inplace=True))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits

    def get_classifier(self) -> nn.Module:
        """The head, as timm's models say it."""
        return self.fc

    @torch.no_grad()
    def init_module_weights(self, module: nn.Module) -> None:
        """Fills what `module` itself owns: its parameters, and the running statistics of a norm."""
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 0.0 if isinstance(module, LastBatchNorm) else 1.0)
            nn.init.zeros_(module.bias)
            module.reset_running_stats()
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)


class PatchEmbed(nn.Module):
    """A linear map of each patch, as a convolution."""

    def __init__(self, in_channels: int, dim: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, patches, dim]."""
        patches: Tensor = self.proj(images)
        return patches.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Every patch attends to every patch."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Four times as wide inside."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    """Pre-norm attention and MLP: the repeated layer."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, n_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D], in the dtype of x and the weights."""
        # Where weights and input arrive in 16 bits, autocast would carry every norm through fp32 and back;
        # F.layer_norm takes its statistics in fp32 in any case.
        with no_autocast_in_16_bits(self.norm1.weight):
            x = x + self.attn(self.norm1(x))
            out: Tensor = x + self.mlp(self.norm2(x))
            return out


class VisionTransformer(nn.Module):
    """ViT-B/16 by default: a class token and patches with learned positions; the class token's last state is read."""

    def __init__(
        self,
        num_classes: int,
        image_size: int = 224,
        patch_size: int = 16,
        dim: int = 768,
        n_layers: int = 12,
        n_heads: int = 12,
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            near = max(1, image_size // patch_size) * patch_size
            raise ConfigError(f"{image_size=} is not a multiple of {patch_size=}; use an image_size of {near}, or a "
                              f"patch_size that divides {image_size}")  # fmt: skip
        if dim % n_heads:
            near = max(1, round(dim / n_heads)) * n_heads
            heads = min((n for n in range(1, abs(dim) + 1) if dim % n == 0), key=lambda n: abs(n - n_heads))
            raise ConfigError(f"{dim=} is not a multiple of {n_heads=}; use a dim of {near}, or an n_heads of {heads}")
        self.num_classes, self.in_channels, self.image_size = num_classes, in_channels, image_size
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.empty(1, (image_size // patch_size) ** 2 + 1, dim))
        self.patch_embed = PatchEmbed(in_channels, dim, patch_size)
        self.blocks = nn.ModuleList(Block(dim, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """[B, in_channels, image_size, image_size] -> [B, num_classes]."""
        patches = self.patch_embed(images)
        x = torch.cat((self.cls_token.expand(len(patches), -1, -1).to(patches.dtype), patches), dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits

    def get_classifier(self) -> nn.Module:
        """The head, as timm's models say it."""
        return self.head

    @torch.no_grad()
    def init_module_weights(self, module: nn.Module) -> None:
        """Fills what `module` itself owns; the model owns its class token and positions."""
        if module is self:
            nn.init.normal_(self.cls_token, std=1e-6)
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        elif isinstance(module, nn.Conv2d):
            nn.init.trunc_normal_(module.weight, std=math.sqrt(1 / module.weight[0].numel()))
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        elif isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


def conv(in_channels: int, channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A padded convolution without bias: a norm follows."""
    return nn.Conv2d(in_channels, channels, kernel, stride=stride, padding=kernel // 2, bias=False)


def shortcut(in_channels: int, channels: int, stride: int) -> nn.Module:
    """The input as it is, or projected where the block changes its shape."""
    if stride == 1 and in_channels == channels:
        return nn.Identity()
    return nn.Sequential(conv(in_channels, channels, 1, stride), nn.BatchNorm2d(channels))
