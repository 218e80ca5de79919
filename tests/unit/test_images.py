"""The image classification recipe: models, augmentation, data and the module between them."""

import io
import json
import math
import os
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning import Trainer
from PIL import Image
from sklearn.metrics import accuracy_score, balanced_accuracy_score, confusion_matrix
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from recipes.image_classification.augment import (
    Augment,
    Draw,
    Purpose,
    beta_table,
    mix,
    mix_int,
    mixup,
    rectangles,
    signed,
)
from recipes.image_classification.class_weights import balanced_weights
from recipes.image_classification.data import (
    Digits,
    ImageData,
    ImageFolder,
    SyntheticImages,
    UndecodableImage,
    WebDataset,
    decode,
    load_tar_index,
)
from recipes.image_classification.model import Attention, ResNet, VisionTransformer
from recipes.image_classification.module import ImageClassifier
from recipes.image_classification.timm_model import timm_model
from shardwise.data.order import splitmix64
from shardwise.errors import ConfigError
from shardwise.parallel.units import find_units
from shardwise.protocols import initializes_itself
from shardwise.weights.initialize import Materializer, freeze_for_good, frozen_names, parameters_on_meta

CONF = Path(__file__).parents[2] / "conf" / "model"
EVERYTHING = Augment(crop_scale=(0.08, 1.0), flip=0.5, brightness=0.4, contrast=0.4, erase=0.5)
NORM = {"mean": [0.5], "std": [0.25]}
PHOTO = {"image_size": 16, "mean": [0.5] * 3, "std": [0.25] * 3, "batch_size": 2}


def tiny(**changes: Any) -> ResNet:
    return ResNet(**({"num_classes": 10, "layers": [1, 1], "block": "basic", "width": 8, "in_channels": 1,
                      "small_images": True} | changes))  # fmt: skip


def vit(**changes: Any) -> VisionTransformer:
    return VisionTransformer(**({"num_classes": 10, "image_size": 8, "patch_size": 2, "dim": 16, "n_layers": 2,
                                 "n_heads": 2, "in_channels": 1} | changes))  # fmt: skip


def from_yaml(name: str) -> ResNet | VisionTransformer:
    arguments = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    target = {"ResNet": ResNet, "VisionTransformer": VisionTransformer}[arguments.pop("_target_").split(".")[-1]]
    facts = {"${data.num_classes}": 1000, "${data.channels}": 3, "${data.image_size}": 8 if "tiny" in name else 224}
    with torch.device("meta"):
        return target(**{key: facts.get(value, value) if isinstance(value, str) else value
                         for key, value in arguments.items()})  # fmt: skip


def filled(module: ImageClassifier, seed: int = 0) -> ImageClassifier:
    Materializer(module, torch.device("cpu"), seed).materialize(module)
    return module


def classifier(model: Any = None, **options: Any) -> ImageClassifier:
    with parameters_on_meta():
        return filled(ImageClassifier(model or tiny(), **(NORM | options)))


def batch_of(count: int, channels: int = 1, size: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "image": torch.randint(0, 256, (count, channels, size, size), dtype=torch.uint8, generator=generator),
        "label": torch.randint(0, 10, (count,), generator=generator),
        "index": torch.randperm(10_000, generator=generator)[:count],
    }


def trainer_for(folder: Path, **options: Any) -> Trainer:
    return Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                   enable_model_summary=False, default_root_dir=folder, **options)  # fmt: skip


# Models


@pytest.mark.parametrize(
    ("name", "parameters"), [("resnet18", 11_689_512), ("resnet50", 25_557_032), ("vit_b16", 86_567_656)]
)
def test_sizes_in_conf_are_the_published_ones(name: str, parameters: int) -> None:
    model = from_yaml(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert find_units(model).share > 0.9
    assert {type(unit).__name__ for _, unit in find_units(model).modules} <= {"Bottleneck", "BasicBlock", "Block"}


@pytest.mark.parametrize("name", ["resnet_tiny", "vit_tiny"])
def test_tiny_models_of_conf_have_units_too(name: str) -> None:
    assert find_units(from_yaml(name)).share > 0.5


def test_parameter_names_are_torchvisions_and_timms() -> None:
    names = set(from_yaml("resnet50").state_dict())
    assert {"conv1.weight", "bn1.running_var", "layer3.5.bn3.weight", "layer2.0.downsample.1.bias", "fc.bias"} <= names
    assert len(names) == 320  # as torchvision's
    names = set(from_yaml("vit_b16").state_dict())
    assert {"cls_token", "pos_embed", "patch_embed.proj.bias", "blocks.11.attn.qkv.bias", "blocks.0.mlp.fc2.weight",
            "norm.bias", "head.weight"} <= names  # fmt: skip
    assert len(names) == 152  # as timm's


def test_shapes_and_where_the_stride_is() -> None:
    images = torch.randn(2, 3, 64, 64)
    for small, side in ((False, 64 // 4 // 8), (True, 64 // 8)):
        model = ResNet(10, layers=[1, 1, 1, 1], width=4, small_images=small)
        seen: dict[str, Tensor] = {}
        model.layer4.register_forward_hook(lambda module, inputs, output, seen=seen: seen.update(last=output))
        assert model(images).shape == (2, 10)
        assert seen["last"].shape == (2, 4 * 8 * 4, side, side)
        first = model.layer2[0]
        assert (first.conv1.stride, first.conv2.stride, first.conv3.stride) == ((1, 1), (2, 2), (1, 1))
    assert vit()(torch.randn(3, 1, 8, 8)).shape == (3, 10)
    with pytest.raises(
        ConfigError, match="image_size=225 is not a multiple of patch_size=16; use an image_size of 224"
    ):
        VisionTransformer(10, image_size=225)
    with pytest.raises(ConfigError, match="dim=16 is not .* n_heads=3; use a dim of 15, or an n_heads of 2$"):
        vit(n_heads=3)
    with pytest.raises(ConfigError, match="block='wide' must be one of basic, bottleneck"):
        tiny(block="wide")
    with pytest.raises(ConfigError, match="layers=.*at least one block"):
        tiny(layers=[2, 0])


@pytest.mark.parametrize("model", [tiny, vit, lambda: tiny(block="bottleneck", small_images=False)])
def test_off_the_meta_device_every_tensor_is_filled_by_its_owner(model: Any) -> None:
    with torch.device("meta"):
        built = model()
    built.to_empty(device="cpu")
    for tensor in (*built.parameters(), *built.buffers()):
        nn.init.constant_(tensor, math.nan if tensor.is_floating_point() else -1)
    for submodule in built.modules():
        before = {name: tensor.clone() for name, tensor in built.named_parameters()}
        built.init_module_weights(submodule)
        owned = {id(parameter) for parameter in submodule.parameters(recurse=False)}
        for name, tensor in built.named_parameters():
            if id(tensor) not in owned:
                torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    for name, tensor in (*built.named_parameters(), *built.named_buffers()):
        assert tensor.isfinite().all() and (tensor >= 0).all() | tensor.is_floating_point(), name


def test_every_resnet_block_starts_as_the_identity() -> None:
    module = classifier(tiny(layers=[3]))
    x = torch.rand(2, 8, 8, 8)
    torch.testing.assert_close(module.model.layer1.eval()(x), x)
    fan_out = module.model.layer1[0].conv1.weight
    assert fan_out.std().item() == pytest.approx(math.sqrt(2 / (8 * 9)), rel=0.2)


def test_attention_is_softmax_over_all_patches() -> None:
    torch.manual_seed(0)
    attention = Attention(16, 2).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    q, k, v = attention.qkv(x).chunk(3, -1)
    heads = [(q[..., s] @ k[..., s].mT / math.sqrt(8)).softmax(-1) @ v[..., s] for s in (slice(0, 8), slice(8, 16))]
    torch.testing.assert_close(attention(x), attention.proj(torch.cat(heads, -1)))


def test_autocast_does_not_reach_the_blocks() -> None:
    model = classifier(vit()).model.bfloat16()
    x = torch.randn(1, 17, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.float16):
        inside = model.blocks[0](x)
    torch.testing.assert_close(inside, model.blocks[0](x), rtol=0, atol=0)


def test_over_fp32_weights_autocast_reaches_the_blocks() -> None:
    block, seen = classifier(vit()).model.blocks[0], []
    for layer in (block.attn.qkv, block.attn.proj, block.mlp.fc2):
        layer.register_forward_hook(lambda layer, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        block(torch.randn(1, 17, 16))
    assert seen == [torch.bfloat16] * 3


# Augmentation


def test_the_hash_is_splitmix64() -> None:
    numbers = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    expected = splitmix64(numbers)
    assert mix(torch.from_numpy(numbers.view(np.int64))).numpy().view(np.uint64).tolist() == expected.tolist()
    assert [mix_int(int(number)) for number in numbers] == expected.tolist()
    assert signed(2**64 - 1) == -1 and signed(5) == 5


def test_numbers_are_uniform_and_unrelated() -> None:
    draw = Draw(seed=0, epoch=0, index=torch.arange(20_000))
    numbers = [
        draw.uniform(Purpose.CROP, 2)[:, 0],
        draw.uniform(Purpose.CROP, 2)[:, 1],
        draw.uniform(Purpose.FLIP)[:, 0],
        Draw(0, 1, draw.index).uniform(Purpose.FLIP)[:, 0],
        Draw(1, 0, draw.index).uniform(Purpose.FLIP)[:, 0],
        Draw(2**63 - 1, 10**6, draw.index + 2**40).uniform(Purpose.FLIP)[:, 0],
    ]
    for values in numbers:
        assert values.min() >= 0 and values.max() < 1
        deciles = torch.histc(values, 10, 0, 1)
        assert (deciles - 2000).abs().max() < 5 * math.sqrt(2000 * 0.9)
    correlation = torch.corrcoef(torch.stack([*numbers, numbers[0].roll(1)]))
    assert (correlation - torch.eye(len(correlation))).abs().max() < 5 / math.sqrt(20_000)


def everything(images: Tensor, index: Tensor, epoch: int = 0, seed: int = 0) -> Tensor:
    draw, mean = Draw(seed, epoch, index), torch.full((images.shape[1], 1, 1), 0.5)
    return EVERYTHING.erased(EVERYTHING.colours_and_crop(images, draw, mean) - mean, draw)


@pytest.mark.parametrize("size", [8, 33])
def test_an_images_augmentation_depends_on_nothing_but_seed_epoch_and_index(size: int) -> None:
    torch.manual_seed(0)
    images, index = torch.rand(64, 3, size, size), torch.randperm(10**6)[:64]
    whole = everything(images, index)
    assert whole.shape == images.shape and whole.abs().max() <= 0.5
    order = torch.randperm(64)
    assert torch.equal(everything(images[order], index[order]), whole[order])
    for start, end in ((0, 1), (5, 7), (10, 41)):
        assert torch.equal(everything(images[start:end], index[start:end]), whole[start:end])
    for other in (everything(images, index, epoch=1), everything(images, index, seed=1), everything(images, index + 1)):
        assert ((other - whole).abs().amax((1, 2, 3)) > 0).all()


def test_a_crop_is_the_rectangle_that_was_drawn() -> None:
    height, width = 12, 20
    draw = Draw(0, 0, torch.arange(500))
    left, top, w, h = rectangles(draw, Purpose.CROP, width, height, (0.2, 1.0), (3 / 4, 4 / 3))
    assert (left >= 0).all() and (left + w <= width).all() and (top >= 0).all() and (top + h <= height).all()
    assert ((w / h).log().abs() <= math.log(4 / 3) + 1e-9).all()
    assert (w * h >= 0.2 * 240 - 1e-6).all() and (w * h).max() > 0.7 * 240 * 0.75
    columns = torch.arange(width) + 0.5  # an image whose value is its column, or row: what is read is where it was
    rows = torch.arange(height) + 0.5
    image = torch.stack((columns.expand(height, -1), rows[:, None].expand(-1, width)))[None].expand(500, -1, -1, -1)
    only_crop = Augment(crop_scale=(0.2, 1.0))
    cropped = only_crop.colours_and_crop(image, draw, torch.zeros(2, 1, 1))
    x = (left[:, None] + w[:, None] * columns / width).clamp(0.5, width - 0.5).float()
    y = (top[:, None] + h[:, None] * rows / height).clamp(0.5, height - 0.5).float()
    torch.testing.assert_close(cropped[:, 0], x[:, None, :].expand(-1, height, -1), rtol=0, atol=1e-4)
    torch.testing.assert_close(cropped[:, 1], y[:, :, None].expand(-1, -1, width), rtol=0, atol=1e-4)


def test_flips_colours_and_erasing() -> None:
    images, mean = torch.rand(1000, 1, 6, 6) * 0.5 + 0.25, torch.full((1, 1, 1), 0.5)
    draw = Draw(0, 0, torch.arange(1000))
    flipped = Augment(flip=0.3).colours_and_crop(images, draw, mean)
    was = (flipped == images.flip(-1)).all(-1).all(-1).all(-1)
    assert torch.equal(flipped[~was], images[~was]) and 250 < was.sum() < 350
    assert torch.equal(Augment().colours_and_crop(images, draw, mean), images)
    brighter = Augment(brightness=0.2).colours_and_crop(images, draw, mean)
    factors = (brighter / images).amax((1, 2, 3))
    assert 0.8 <= factors.min() < 0.82 and 1.18 < factors.max() <= 1.2001
    contrast = (Augment(contrast=0.2).colours_and_crop(images, draw, mean) - 0.5) / (images - 0.5)
    assert contrast.min() > 0.79 and contrast.max() < 1.21 and contrast.amax((1, 2, 3)).std() > 0.1
    erased = Augment(erase=0.4).erased(images, draw) == 0
    assert 0.3 < erased.any(-1).any(-1).float().mean() < 0.42  # a rectangle may lie between the pixels
    for mask in erased[erased.any(-1).any(-1)[:, 0]][:, 0]:
        assert torch.equal(mask, mask.any(1)[:, None] & mask.any(0)[None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flip": 1.5}, "flip=1.5 is a probability"),
        ({"erase": -0.1}, "erase=-0.1 is a probability"),
        ({"contrast": 1.0}, "contrast=1.0 must be at least 0 and below 1"),
        ({"crop_scale": [0, 1]}, "crop_scale=.0, 1.: two shares"),
        ({"crop_ratio": [2, 1]}, "crop_ratio=.2, 1.: two ratios"),
    ],
)
def test_augmentation_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Augment(**options)


def test_beta_quantiles() -> None:
    u = torch.linspace(0, 1, 4097, dtype=torch.float64)
    torch.testing.assert_close(beta_table(1.0), u, rtol=0, atol=1e-9)
    torch.testing.assert_close(beta_table(0.5), torch.sin(u * math.pi / 2) ** 2, rtol=0, atol=1e-6)
    x = beta_table(2.0)
    torch.testing.assert_close(3 * x**2 - 2 * x**3, u, rtol=0, atol=1e-6)
    x = beta_table(0.2)
    assert x.isfinite().all() and (x.diff() >= 0).all()
    assert x.var().item() == pytest.approx(1 / (4 * (2 * 0.2 + 1)), rel=1e-2)
    with pytest.raises(ConfigError, match="mixup_alpha=-1.0: Beta"):
        beta_table(-1.0)


def test_mixup_pairs_by_sample_and_not_by_place() -> None:
    images, index, table = torch.rand(16, 1, 4, 4), torch.arange(100, 116), beta_table(0.4)
    mixed, partner, share = mixup(images, Draw(0, 0, index), table)
    assert sorted(partner.tolist()) == list(range(16)) and (partner != torch.arange(16)).all()
    expected = images * share[:, None, None, None] + images[partner] * (1 - share)[:, None, None, None]
    torch.testing.assert_close(mixed, expected)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    again, partner_again, share_again = mixup(images[order], Draw(0, 0, index[order]), table)
    assert torch.equal(again, mixed[order]) and torch.equal(share_again, share[order])
    assert torch.equal(index[order][partner_again], index[partner][order])
    shares = mixup(torch.rand(5000, 1, 1, 1), Draw(0, 0, torch.arange(5000)), table)[2]
    assert shares.mean().item() == pytest.approx(0.5, abs=0.03)
    assert shares.var().item() == pytest.approx(1 / (4 * 1.8), rel=0.05)


# The module


def hooked(module: ImageClassifier, batch: dict[str, Tensor], training: bool, epoch: int = 0) -> dict[str, Tensor]:
    class Stage:
        current_epoch = epoch

    Stage.training = training  # type: ignore[attr-defined]
    module._trainer = Stage()  # type: ignore[assignment]
    try:
        return module.on_after_batch_transfer(batch, 0)
    finally:
        module._trainer = None


def test_only_training_batches_are_augmented_and_all_are_normalised() -> None:
    module, batch = classifier(augment=EVERYTHING, mixup_alpha=0.2, channels_last=True), batch_of(32)
    plain = (batch["image"].float() / 255 - 0.5) / 0.25
    still = hooked(module, batch, training=False)
    torch.testing.assert_close(module._normalised(still["image"]), plain)
    assert still.keys() == batch.keys() and batch["image"].dtype == torch.uint8
    first, same, later = (hooked(module, batch, training=True, epoch=epoch) for epoch in (0, 0, 1))
    assert (first["image"] - plain).abs().max() > 0.1 and {"partner", "share"} <= first.keys()
    assert torch.equal(first["image"], same["image"]) and not torch.equal(first["image"], later["image"])
    colour = classifier(tiny(in_channels=3), mean=[0.5] * 3, std=[0.2] * 3, channels_last=True)
    seen = colour._normalised(hooked(colour, batch_of(2, 3), training=True)["image"])
    assert seen.is_contiguous(memory_format=torch.channels_last)
    assert classifier().double()._normalised(batch["image"]).dtype == torch.float64


def test_the_loss_is_cross_entropy_mixed_as_the_images_are() -> None:
    module = classifier(vit(), label_smoothing=0.1, mixup_alpha=0.4)
    nn.init.normal_(module.model.head.weight)
    batch = hooked(module, batch_of(12), training=True)
    log_p = module.model(batch["image"]).double().log_softmax(-1)
    target = F.one_hot(batch["label"], 10) * batch["share"][:, None].double()
    target = target + F.one_hot(batch["partner"], 10) * (1 - batch["share"])[:, None].double()
    expected = -(log_p * (0.9 * target + 0.1 / 10)).sum(-1).mean()
    assert module.training_step(batch, 0).item() == pytest.approx(expected.item(), rel=1e-5)
    assert module.loss_weight(batch) == 12 and isinstance(module.loss_weight(batch), int)
    assert (
        classifier().bfloat16()._logits({"image": torch.zeros(2, 1, 8, 8, dtype=torch.bfloat16)}).dtype == torch.float32
    )


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="module.mean has 3 values, module.std 1, and model.in_channels=1"):
        classifier(mean=[0.5] * 3)
    with pytest.raises(ConfigError, match="module.std=.0.0.: values are divided by it"):
        classifier(std=[0.0])
    with pytest.raises(ConfigError, match="module.label_smoothing=1.0 must be"):
        classifier(label_smoothing=1.0)
    with pytest.raises(
        ConfigError, match="module.model is a Linear: it must be .* with the attribute num_classes, a wh"
    ):
        ImageClassifier(nn.Linear(2, 2), [0.5], [0.5])  # type: ignore[arg-type]


class Recorded(ImageClassifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def test_it_learns_and_evaluation_counts_every_sample_once(tmp_path: Path) -> None:
    with parameters_on_meta():
        module = Recorded(tiny(layers=[1, 1, 1]), mean=[0.305], std=[0.376])
    filled(module)
    before = {name: tensor.shape for name, tensor in module.state_dict().items()}
    parameters, buffers = len(list(module.parameters())), len(list(module.buffers()))
    data = Digits(mean=[0.305], std=[0.376], batch_size=64)
    trainer = trainer_for(tmp_path, max_epochs=4, num_sanity_val_steps=1)
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    measured = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert measured["test/accuracy"] > 0.9
    predicted = [int(name) for batch in trainer.predict(module, data) for name in batch["class"]]  # type: ignore[union-attr, call-overload]
    labels = torch.stack([sample["label"] for sample in data.splits["test"]])  # type: ignore[attr-defined]
    assert measured["test/accuracy"] == pytest.approx(accuracy_score(labels, predicted), abs=1e-6)
    assert measured["test/balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, predicted), abs=1e-6)
    assert int(module.confusion.compute().sum()) == len(labels) == 270  # type: ignore[union-attr]
    with torch.no_grad():
        whole = hooked(module.eval(), torch.utils.data.default_collate(list(data.splits["test"])), training=False)  # type: ignore[call-overload]
        assert measured["test/loss"] == pytest.approx(module.training_step(whole, 0).item(), rel=1e-4)
    for stage in ("validation", "test"):
        with Image.open(tmp_path / f"confusion_matrix_{stage}.png") as picture:
            assert picture.width > 300
    rows = json.loads((tmp_path / "classes_test.json").read_text())
    assert rows["right"] == np.diag(confusion_matrix(labels, predicted)).tolist()
    assert rows["images"] == np.bincount(labels).tolist() and rows["predicted"] == np.bincount(predicted).tolist()
    assert {name: tensor.shape for name, tensor in module.state_dict().items()} == before
    assert (len(list(module.parameters())), len(list(module.buffers()))) == (parameters, buffers)


def test_many_classes_are_measured_and_not_drawn(tmp_path: Path) -> None:
    module = classifier(tiny(num_classes=101))
    data = SyntheticImages(**NORM, batch_size=4, num_classes=101, channels=1, image_size=8, samples=8, distinct=4,
                           validation_samples=6)  # type: ignore[arg-type] # fmt: skip
    trainer = trainer_for(tmp_path)
    trainer.validate(module, data, verbose=False)
    assert {"validation/loss", "validation/accuracy"} <= trainer.callback_metrics.keys()
    assert module.confusion is None and [path.name for path in tmp_path.iterdir()] == ["classes_validation.json"]


def test_data_that_the_model_cannot_take_is_refused(tmp_path: Path) -> None:
    data = Digits(**NORM, batch_size=4)  # type: ignore[arg-type]
    for model, message in (
        (tiny(num_classes=9), "data.num_classes=10 and model.num_classes=9 are not equal"),
        (vit(image_size=16), "data.image_size=8 and model.image_size=16"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer_for(tmp_path).validate(ImageClassifier(model, [0.5], [0.5]), data)
    with pytest.raises(ConfigError, match="data.channels=1 and model.in_channels=3"):
        data.check_fits(10, 3, None)
    with pytest.raises(ConfigError, match="the digits are what they are"):
        Digits(**NORM, batch_size=4, image_size=16)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", ["balanced", [0.5, 2.0, *[1.0] * 8]])
def test_weighted_micro_batches_make_torchs_loss_of_the_whole_batch(weights: Any) -> None:
    torch.manual_seed(0)  # with other weights the two losses may be equal by chance
    data = Digits(**NORM, batch_size=4)  # type: ignore[arg-type]
    data.setup("fit")
    module = classifier(vit(), class_weights=weights, label_smoothing=0.1)
    nn.init.normal_(module.model.head.weight)
    module._trainer = SimpleNamespace(datamodule=data)  # type: ignore[assignment]
    module.setup("fit")
    labels = data.splits["train"].labels  # type: ignore[attr-defined]
    expected = weights
    if weights == "balanced":
        expected = compute_class_weight("balanced", classes=np.arange(10), y=labels.numpy())
    expected = torch.tensor(expected, dtype=torch.float32)
    whole = batch_of(12)
    logits = module._logits(whole)
    mean = F.cross_entropy(logits, whole["label"], expected, label_smoothing=0.1)
    parts = [{key: value[part] for key, value in whole.items()} for part in (slice(0, 3), slice(3, 4), slice(4, 12))]
    sums = [module.training_step(part, 0) * module.loss_weight(part) for part in parts]
    assert sum(sums).item() / sum(map(module.loss_weight, parts)) == pytest.approx(mean.item(), rel=1e-5)
    plain = F.cross_entropy(logits, whole["label"], label_smoothing=0.1)
    assert plain.item() != pytest.approx(mean.item(), rel=1e-3)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("even", "module.class_weights=even: must be balanced, or a list"),
        ([1.0], "module.class_weights has 1 number, and model.num_classes=10"),
        ([-1.0] * 10, "each must be at least 0"),
        ([0.0] * 10, "and one above 0"),
    ],
)
def test_class_weights_that_cannot_be_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        classifier(class_weights=weights)


def test_weights_of_a_class_without_images_and_of_data_without_labels_are_refused() -> None:
    rare = SimpleNamespace(splits={"train": SimpleNamespace(labels=torch.tensor([0, 2]))})
    with pytest.raises(ConfigError, match="class 1 has no training images"):
        balanced_weights(rare, 3)
    with pytest.raises(ConfigError, match="counts the labels of a training set"):
        balanced_weights(object(), 3)


class Plain(nn.Module):
    """A model that knows nothing of this program."""

    def __init__(self) -> None:
        super().__init__()
        self.num_classes, self.net = 10, nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)


def test_a_model_of_ones_own_needs_num_classes_alone(tmp_path: Path) -> None:
    module = ImageClassifier(Plain(), [0.3], [0.3])
    assert not initializes_itself(module) and initializes_itself(ImageClassifier)
    assert module.head_name == "model.net.1"
    assert classifier().head_name == "model.fc" and classifier(vit()).head_name == "model.head"
    trainer_for(tmp_path).validate(module, Digits(**NORM, batch_size=64), verbose=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "frozen", "not_frozen"),
    [
        (
            ["backbone"],
            ["model.conv1.weight", "model.layer1.0.bn1", "model.layer2"],
            ["model", "model.fc", "model.fc.bias"],
        ),
        (
            ["model.layer1"],
            ["model.layer1", "model.layer1.0.bn1.weight"],
            ["model.layer2", "model.layer10.0", "model.fc"],
        ),
        (["model.fc.bias", "model.bn1"], ["model.fc.bias", "model.bn1.weight"], ["model.fc", "model.fc.weight"]),
    ],
)
def test_what_is_frozen_is_told_by_name(parts: list[str], frozen: list[str], not_frozen: list[str]) -> None:
    plan: Any = SimpleNamespace(freeze=parts)
    is_frozen = frozen_names(plan, classifier())
    assert all(map(is_frozen, frozen)) and not any(map(is_frozen, not_frozen))


def test_a_part_that_is_not_there_and_freezing_all_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = SimpleNamespace(freeze=["model.stem"], freeze_epochs=None, stage="fit")
    with pytest.raises(
        ConfigError, match="freeze=model.stem: ImageClassifier has no part of this name.*; give .* below mod"
    ):
        freeze_for_good(plan, classifier())
    plan.freeze = ["model"]
    with pytest.raises(ConfigError, match="freeze=model leaves no parameter to train"):
        freeze_for_good(plan, classifier())
    plan.stage = "test"
    freeze_for_good(plan, module := classifier())
    assert all(p.requires_grad for p in module.parameters())


def test_models_of_timm_come_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm itself needs torchvision, which need not be there."""
    made: list[dict[str, Any]] = []

    def create_model(name: str, **options: Any) -> nn.Module:
        made.append(options)
        model = Plain()
        if name == "vit":
            model.patch_embed = SimpleNamespace(img_size=options.get("img_size", 224))  # type: ignore[assignment]
        return model

    names = ["vit", "resnet18"]
    timm = SimpleNamespace(create_model=create_model, is_model=names.__contains__, list_models=lambda: names)
    monkeypatch.setitem(sys.modules, "timm", timm)  # type: ignore[arg-type]
    assert timm_model("resnet18", 10, 1, 8, {"drop_rate": 0.1}).in_channels == 1
    assert made == [{"num_classes": 10, "in_chans": 1, "drop_rate": 0.1}]
    assert timm_model("vit", 10, 1, 8).patch_embed.img_size == 8  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"model.name=resnt18: timm has no .* \(did you mean resnet18\?"):
        timm_model("resnt18", 10)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        ConfigError, match="model=timm needs timm, which cannot be imported .*: pip install timm, and the"
    ):
        timm_model("resnet18", 10)


# Data


def jpeg(colour: tuple[int, int, int], size: tuple[int, int] = (40, 30), kind: str = "JPEG") -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, colour).save(content, kind, quality=95)
    return content.getvalue()


def write_folder(root: Path, splits: tuple[str, ...] = ("train", "validation")) -> Path:
    for split in splits:
        for label, name in enumerate(("ant", "bee")):
            (root / split / name).mkdir(parents=True)
            for i in range(3):
                suffix = ("jpg", "JPEG", "png")[i]
                kind = "PNG" if suffix == "png" else "JPEG"
                (root / split / name / f"{i}.{suffix}").write_bytes(jpeg((100 * label, 80 * i, 50), kind=kind))
            (root / split / name / "notes.txt").write_text("no image")
    return root


def folder(root: Path, **options: Any) -> ImageFolder:
    return ImageFolder(str(root), **({"num_classes": 2} | PHOTO | options))  # type: ignore[arg-type]


def test_digits_are_split_once_and_for_all() -> None:
    data = Digits(**NORM, batch_size=4)  # type: ignore[arg-type]
    data.setup("fit")
    assert {split: len(dataset) for split, dataset in data.splits.items()} == {  # type: ignore[arg-type]
        "train": 1258, "validation": 269, "test": 270}  # fmt: skip
    images = torch.cat([dataset.images for dataset in data.splits.values()])  # type: ignore[attr-defined]
    assert images.dtype == torch.uint8 and images.shape == (1797, 1, 8, 8) and images.max() == 255
    # the same on every machine
    assert data.splits["train"].labels[:8].tolist() == [4, 0, 7, 3, 5, 3, 2, 1]  # type: ignore[attr-defined]
    batch = next(iter(data.val_dataloader()))
    assert batch["label"].dtype == batch["index"].dtype == torch.int64 and batch["index"].tolist() == [0, 1, 2, 3]


def test_a_folder_of_images(tmp_path: Path) -> None:
    data = folder(write_folder(tmp_path), num_workers=1)
    data.check()
    data.setup("fit")
    assert data.splits.keys() == {"train", "validation"}
    batches = list(data.val_dataloader())
    assert torch.cat([batch["label"] for batch in batches]).tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.cat([batch["index"] for batch in batches]).tolist() == list(range(6))
    images = torch.cat([batch["image"] for batch in batches])
    assert images.dtype == torch.uint8 and images.shape == (6, 3, 16, 16)
    for i, image in enumerate(images):
        expected = torch.tensor([100 * (i // 3), 80 * (i % 3), 50])
        assert (image.int() - expected[:, None, None]).abs().max() <= 4, i
    with pytest.raises(ConfigError, match="no test split, but train and validation: training needs train and valid"):
        data.test_dataloader()
    write_folder(tmp_path, ("test",))
    data.setup("test")
    assert len(data.test_dataloader()) == 3
    grey = folder(tmp_path, channels=1, mean=[0.5], std=[0.5])
    grey.setup("fit")
    assert grey.splits["train"][0]["image"].shape == (1, 16, 16)


def test_a_folder_with_a_test_split_alone_is_tested_and_images_without_labels_are_predicted(tmp_path: Path) -> None:
    trained = ImageClassifier(tiny(num_classes=2, in_channels=3), **{key: PHOTO[key] for key in ("mean", "std")})  # type: ignore[arg-type]
    filled(trained)
    trained.class_names = ["ant", "bee"]
    checkpoint: dict[str, Any] = {}
    trained.on_save_checkpoint(checkpoint)
    only = folder(write_folder(tmp_path / "only", ("test",)), batch_size=4)
    (tmp_path / "only/test/.hidden").mkdir()
    only.check()
    trainer = trainer_for(tmp_path)
    trainer.test(trained, only, verbose=False)
    assert json.loads((tmp_path / "classes_test.json").read_text())["classes"] == ["ant", "bee"]
    first = trainer.predict(trained, only)[0]  # type: ignore[index]
    assert first["label"] == ["ant", "ant", "ant", "bee"] and set(first["class"]) <= {"ant", "bee"}  # type: ignore[index]
    with pytest.raises(ConfigError, match="no train split, but test: training needs train and validation"):
        only.train_dataloader()

    flat = tmp_path / "flat"
    flat.mkdir()
    for name in ("a.jpg", "b.png"):
        (flat / name).write_bytes(jpeg((200, 9, 9)))
    (flat / "c.jpg").write_bytes(b"no image")
    images = folder(flat, on_undecodable="skip")
    images.check()
    trained.class_names = None
    trained.on_load_checkpoint(checkpoint)
    rows = trainer.predict(trained, images)
    assert [file for row in rows for file in row["file"]] == [str(flat / name) for name in ("a.jpg", "b.png", "c.jpg")]  # type: ignore[union-attr, call-overload]
    assert rows[1]["class"] == [None] and rows[1]["probability"] == [None]  # type: ignore[index, call-overload]
    assert rows[0]["class"][0] in ("ant", "bee") and 0.5 <= rows[0]["probability"][0] <= 1  # type: ignore[index, call-overload]
    assert "label" not in rows[0]  # type: ignore[index]
    with pytest.raises(ConfigError, match="lie in no class folders, so that there is nothing to compare"):
        images.test_dataloader()
    trained.class_names = ["ant", "wasp"]
    with pytest.raises(ConfigError, match="class 1 is 'wasp' here and was 'bee' there"):
        trained.on_load_checkpoint(checkpoint)


def test_decoding_keeps_the_middle_of_the_longer_side() -> None:
    image = Image.new("RGB", (1200, 400))
    image.paste((250, 0, 0), (400, 0, 800, 400))
    content = io.BytesIO()
    image.save(content, "JPEG", quality=95)
    pixels = decode(content.getvalue(), "RGB", 32).int()
    assert (pixels[0] > 230).float().mean() > 0.9  # the border blurs
    assert decode(jpeg((9, 9, 9), (8, 20)), "RGB", 16).shape == (3, 16, 16)  # smaller than asked for


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_sixteen_bits_a_pixel_become_eight(mode: str) -> None:
    deep = Image.fromarray(np.full((16, 16), 84 * 256 + 17, dtype=np.uint16))
    content = io.BytesIO()
    deep.save(content, "PNG")
    assert Image.open(content).mode == "I;16"
    assert decode(content.getvalue(), mode, 16).unique().tolist() == [84]
    content = io.BytesIO()
    Image.fromarray(np.full((16, 16), 0.5, dtype=np.float32)).save(content, "TIFF")
    with pytest.raises(ValueError, match="mode F, whose range is not known"):
        decode(content.getvalue(), mode, 16)


def test_folders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none: there is no such folder"):
        folder(tmp_path / "none").check()
    (tmp_path / "none").mkdir()
    with pytest.raises(
        ConfigError, match="none has no folder train, validation or test, and no images .*<class>/ to t"
    ):
        folder(tmp_path / "none").check()
    root = write_folder(tmp_path / "data")
    with pytest.raises(
        ConfigError, match="train has 2 class folders, and data.num_classes=1000: use data.num_classes=2"
    ):
        folder(root, num_classes=1000).check()
    (root / "validation" / "cat").mkdir()
    with pytest.raises(ConfigError, match="validation has 3 class folders and train 2, .*: cat is in validation only"):
        folder(root).check()
    for name in ("ape", "eel"):
        (root / "train" / name).mkdir()
    with pytest.raises(ConfigError, match="differ: ape and 1 more are in train only, cat is in validation only; every"):
        folder(root).check()
    for name in ("ape", "eel"):
        (root / "train" / name).rmdir()
    (root / "train" / "cat").mkdir()
    (root / "train" / "cat" / "a.png").write_bytes(jpeg((1, 2, 3), kind="PNG"))
    with pytest.raises(ConfigError, match="class folder .*validation/cat has 0 images"):
        folder(root, num_classes=3).check()
    (root / "test").mkdir()
    with pytest.raises(ConfigError, match="test has 0 class folders"):
        folder(root, num_classes=3).check()
    with pytest.raises(ConfigError, match="data.on_undecodable='ignore' must be stop or skip"):
        folder(root, on_undecodable="ignore")
    with pytest.raises(ConfigError, match="data.channels=4: must be 3"):
        folder(root, channels=4)


def broken(root: Path) -> Path:
    write_folder(root)
    (root / "train/ant/1.JPEG").write_bytes(b"not an image")
    path = root / "train/bee/0.jpg"
    path.write_bytes(path.read_bytes()[:300])  # cut short
    return root


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_decoded_stops_the_run_in_one_message(tmp_path: Path, workers: int) -> None:
    data = folder(broken(tmp_path), num_workers=workers)
    data.check()  # names only: decoding everything would take hours
    data.setup("fit")
    with pytest.raises(ConfigError) as caught:
        list(data._loader("train", shuffle=False))
    assert str(caught.value).startswith(
        f"{tmp_path}/train/ant/1.JPEG (12 bytes) cannot be decoded: not an image that Pillow knows;"
    )
    assert str(caught.value).endswith("or use data.on_undecodable=skip to put the next image in its place")
    assert "\n" not in str(caught.value)


def test_skipped_images_are_replaced_by_the_next_counted_and_named_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for workers in (0, 2):
        data = folder(broken(tmp_path / str(workers)), num_workers=workers, on_undecodable="skip")
        data.setup("fit")
        loader = data._loader("train", shuffle=False)
        for _ in range(2):
            batches = list(loader)
            images = torch.cat([batch["image"] for batch in batches])
            assert torch.cat([batch["index"] for batch in batches]).tolist() == list(range(6))
            assert torch.cat([batch["label"] for batch in batches]).tolist() == [0, 0, 0, 1, 1, 1]
            assert torch.equal(images[1], images[2]) and torch.equal(images[3], images[4])
        assert data.splits["train"].skipped() == 2  # type: ignore[attr-defined]
        said = capfd.readouterr().err.splitlines()
        assert len(said) == 2 and {"ant/1.JPEG" in line for line in said} == {True, False}
        assert all("skipped" in line for line in said)
    for file in (tmp_path / "0" / "train").rglob("*.*"):
        file.write_bytes(b"")
    data = folder(tmp_path / "0", on_undecodable="skip")
    data.setup("fit")
    with pytest.raises(UndecodableImage, match="none of 6 images can be decoded"):
        data.splits["train"][4]
    (tmp_path / "0" / "train/ant/0.jpg").unlink()
    data.splits["train"].undecodable[:] = False  # type: ignore[attr-defined]
    with pytest.raises(UndecodableImage, match="ant/0.jpg cannot be read: No such file"):
        data.splits["train"][0]  # a file that is gone is no broken image


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_shards(root: Path) -> Path:
    root.mkdir(exist_ok=True)
    for split, shards in (("train", 2), ("validation", 1)):
        for shard in range(shards):
            members: dict[str, bytes] = {}
            for i in range(3):
                members |= {
                    f"a/{i}.cls": f"{i}\n".encode(),
                    f"a/{i}.jpg": jpeg((60 * i, 100 * shard, 0)),
                    f"a/{i}.json": b"",
                }
            write_tar(root / f"{split}-{shard:03d}.tar", members)
    return root


def shards(root: Path, **options: Any) -> WebDataset:
    return WebDataset(str(root), **({"num_classes": 3} | PHOTO | options))  # type: ignore[arg-type]


def test_tar_shards_are_indexed_once_and_read_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = shards(write_shards(tmp_path / "data"), num_workers=2)
    data.check()
    assert sorted(path.name for path in (tmp_path / "data").glob("*.npz")) == [
        "train-000.tar.index.npz", "train-001.tar.index.npz", "validation-000.tar.index.npz"]  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr("tarfile.open", None)  # everything comes from the cache now
        data.setup("fit")
    assert data.splits.keys() == {"train", "validation"}
    batches = list(data._loader("train", shuffle=False))
    assert torch.cat([batch["label"] for batch in batches]).tolist() == [0, 1, 2, 0, 1, 2]
    for i, image in enumerate(torch.cat([batch["image"] for batch in batches])):
        expected = torch.tensor([60 * (i % 3), 100 * (i // 3), 0])
        assert (image.int() - expected[:, None, None]).abs().max() <= 4, i
    # A shard that changed is read again; one whose cache is damaged too.
    shard = write_tar(tmp_path / "data/train-001.tar", {"b.png": jpeg((1, 1, 1), kind="PNG"), "b.cls": b"1"})
    assert load_tar_index(shard, None)["names"].tolist() == [b"b.png"]
    cache = tmp_path / "data/train-001.tar.index.npz"
    cache.write_bytes(cache.read_bytes()[:100])
    assert load_tar_index(shard, None)["labels"].tolist() == [1]
    assert not list((tmp_path / "data").glob(".*"))
    elsewhere = shards(tmp_path / "data", cache_directory=str(tmp_path / "cache" / "deep"))
    elsewhere.check()
    assert len(list((tmp_path / "cache" / "deep").iterdir())) == 3


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "train-000.tar has 0 samples"),
        ({"x.jpg": b"1"}, "sample x has an image and no .cls: it needs both"),
        ({"a/x.cls": b"1"}, "sample a/x has a .cls and no image"),
        ({"x.jpg": b"1", "x.cls": b"cat"}, "x.cls holds b'cat': must be a class's number"),
        ({"x.jpg": b"1", "x.cls": b"3"}, "sample x.jpg is of class 3, and data.num_classes=3 has 0 to 2"),
        ({"x.jpg": b"1", "x.png": b"1", "x.cls": b"1"}, "x.png is the second .png of its sample"),
    ],
)
def test_shards_that_cannot_be_are_refused(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    write_shards(tmp_path)
    write_tar(tmp_path / "train-000.tar", members)
    with pytest.raises(ConfigError, match=message):
        shards(tmp_path).check()


def test_shards_that_are_missing_cut_short_or_no_tar_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="has 0 shards: data.directory needs train-"):
        shards(tmp_path).check()
    shard = write_tar(tmp_path / "train-0.tar", {"x.cls": b"1", "x.jpg": b"1" * 9000})
    whole = shard.read_bytes()
    for kept in (5000, 512 + 512 + 512 + 9216, 512 + 512 + 100):  # in an image, after one, in the head of one
        shard.write_bytes(whole[:kept])
        with pytest.raises(ConfigError, match="cut short|unexpected end of data"):
            shards(tmp_path).check()
    shard.write_bytes(b"not a tar" * 1000)
    with pytest.raises(ConfigError, match="train-0.tar cannot be read as an uncompressed tar: .*; copy or pack"):
        shards(tmp_path).check()
    shard.write_bytes(whole)
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    assert len(load_tar_index(shard, None)["labels"]) == 1  # shards that are read-only can still be used
    assert "cannot keep" in capfd.readouterr().err and not list(tmp_path.glob(".*"))


def test_synthetic_images_are_noise_that_is_made_once() -> None:
    data = SyntheticImages(mean=[0.5] * 3, std=[0.3] * 3, batch_size=4, image_size=8, samples=100, distinct=3)
    data.setup("fit")
    train = data.splits["train"]
    assert len(train) == 100 and torch.equal(train[1]["image"], train[4]["image"])  # type: ignore[arg-type]
    assert train[4]["index"] == 4 and not torch.equal(train[1]["image"], train[2]["image"])
    assert isinstance(data, ImageData) and int(data.labels.min()) >= 0 and int(data.labels.max()) < 1000
    with pytest.raises(ConfigError, match="data.distinct=0: must be at least 1"):
        SyntheticImages(mean=[0.5] * 3, std=[0.3] * 3, batch_size=4, distinct=0)


# Operations


@pytest.mark.parametrize(
    "model",
    [
        tiny(),
        tiny(block="bottleneck", layers=[1, 2], in_channels=3, small_images=False),
        vit(),
        vit(patch_size=4, n_layers=3, n_heads=4, in_channels=3),
    ],
    ids=["basic", "bottleneck", "vit", "larger vit"],
)
def test_flops_are_what_torch_counts(model: ResNet | VisionTransformer) -> None:
    channels, size = model.in_channels, model.image_size or 32
    module = classifier(model, mean=[0.5] * channels, std=[0.25] * channels)
    batch = batch_of(3, channels, size)
    # The kernel of attention whose products are counted one by one, and which recomputes nothing in backward.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module.training_step(batch, 0).backward()
    stem = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    gradient_of_the_images = 2 * 3 * stem.weight.numel() * (size // stem.stride[0]) ** 2  # which nobody asks for
    flops = module.flops(batch)
    assert isinstance(flops, int) and flops == counter.get_total_flops() + gradient_of_the_images
    assert module.flops(batch_of(6, channels, size)) == 2 * flops


@pytest.mark.parametrize(
    ("name", "size", "multiplications"),
    [("resnet50", 224, 4.09e9), ("resnet50", 96, 0.752e9), ("vit_b16", 224, 17.6e9)],
)
def test_flops_are_six_for_each_multiplication_that_is_published(name: str, size: int, multiplications: float) -> None:
    module = ImageClassifier(from_yaml(name), mean=[0.5] * 3, std=[0.25] * 3)
    batch = {"image": torch.empty(2, 3, size, size, device="meta", dtype=torch.uint8)}
    assert module.flops(batch) == pytest.approx(2 * 6 * multiplications, rel=0.01)


def test_counting_is_done_once_for_each_shape_and_is_no_part_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = classifier()
    small, large = module.flops(batch_of(2)), module.flops(batch_of(2, size=16))
    assert small < large
    monkeypatch.setattr(FlopCounterMode, "__enter__", lambda self: pytest.fail("counted again"))
    assert (module.flops(batch_of(2)), module.flops(batch_of(2, size=16))) == (small, large)
    assert len(list(module.parameters())) == len(list(module.model.parameters()))
    assert not any(name.startswith("_") for name, _ in module.named_children())
