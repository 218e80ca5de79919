"""Units on small modules of every common shape: what is found, what it covers, and what is said where it is wrong."""

import re

import pytest
from torch import nn

from shardwise.errors import ConfigError
from shardwise.parallel.units import Units, find_units


class Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)


class DecoderBlock(Block):
    pass


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleDict({f"layer{i}": DecoderBlock() for i in range(2)})
        self.norm = nn.LayerNorm(8)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()
        for stage, blocks in enumerate((1, 2, 3, 1)):
            setattr(self, f"stage{stage}", nn.Sequential(*(Block(8 * 2**stage) for _ in range(blocks))))
        self.head = nn.Linear(64, 10)


def names(units: Units) -> list[str]:
    return [name for name, _ in units.modules]


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_encoder_and_decoder() -> None:
    model = Translator()
    units = find_units(model)
    assert names(units) == ["encoder.0", "encoder.1", "encoder.2", "decoder.layer0", "decoder.layer1"]
    assert all(model.get_submodule(name) is module for name, module in units.modules)
    assert units.covered == 3 * count(Block()) + 2 * count(Block())
    assert units.total == count(model)
    assert str(units).startswith("3 × Block, 2 × DecoderBlock, with ")
    assert f"of {count(model):,} parameters" in str(units)


def test_every_stage_of_a_resnet_even_those_with_one_block() -> None:
    expected = ["stage0.0", "stage1.0", "stage1.1", "stage2.0", "stage2.1", "stage2.2", "stage3.0"]
    assert names(find_units(ResNet())) == expected


def test_units_are_found_below_a_wrapper() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Translator()
            self.criterion = nn.CrossEntropyLoss()

    assert names(find_units(Wrapper())) == [f"model.{name}" for name in names(find_units(Translator()))]


def test_no_unit_contains_another() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(Block() for _ in range(2))

    model = nn.Sequential(Outer(), Outer())
    assert names(find_units(model)) == ["0", "1"]
    assert names(find_units(model, ["Block", "Outer"])) == ["0", "1"]
    assert names(find_units(model, ["Block"])) == ["0.inner.0", "0.inner.1", "1.inner.0", "1.inner.1"]


def test_the_models_own_word_comes_first() -> None:
    class Declares(Translator):
        _no_split_modules = ("DecoderBlock", "Absent")

        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.ModuleDict({f"layer{i}": DecoderBlock(16) for i in range(3)})

    units = find_units(nn.Sequential(Declares()))
    assert names(units) == ["0.decoder.layer0", "0.decoder.layer1", "0.decoder.layer2"]
    assert units.rule == "named by _no_split_modules"
    assert names(find_units(Declares(), ["Block"])) == ["encoder.0", "encoder.1", "encoder.2"]  # the user's word first


def test_a_word_of_the_model_that_matches_nothing_is_passed_over() -> None:
    class Mistaken(Translator):
        _no_split_modules = ("T5Block",)

    assert find_units(Mistaken()).rule == "found by their class"


def test_an_mlp_is_sharded_by_its_linears() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    units = find_units(model)
    assert names(units) == ["0", "2", "4"] and units.share == 1


def test_repeated_leaves_beside_blocks_are_no_units() -> None:
    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(10, 8), nn.Embedding(10, 8)
            self.blocks = nn.ModuleList(Block() for _ in range(3))

    assert names(find_units(Gpt())) == ["blocks.0", "blocks.1", "blocks.2"]


def test_wrong_names_are_told_what_there_is_and_it_works() -> None:
    with pytest.raises(
        ConfigError, match=r"units=\['Block', 'Blok'\]: no layer of class Blok; the module has "
    ) as error:
        find_units(Translator(), ["Block", "Blok"])
    offered = re.findall(r"\d × (\w+)", str(error.value))
    assert "DecoderBlock" in offered
    for name in offered:
        assert find_units(Translator(), [name]).modules


def test_where_embeddings_dominate_the_layers_are_found_and_the_rest_is_counted() -> None:
    class Large(Translator):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10_000, 8)

    units = find_units(Large())
    assert names(units) == names(find_units(Translator()))
    assert units.share < 0.5 and units.rest == 10_000 * 8 + count(nn.LayerNorm(8))
    assert find_units(Large(), []).modules == ()


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(32, 2)), nn.ModuleList([nn.LSTM(4, 8), nn.Linear(8, 1)])])
def test_no_repeated_layers_are_refused_only_where_a_word_would_do_nothing(model: nn.Module) -> None:
    assert find_units(model).modules == ()
    with pytest.raises(
        ConfigError, match=r"^compile=layer and activation_checkpointing=full act on the layers that repeat, and "
    ) as error:
        find_units(model, None, ["compile=layer", "activation_checkpointing=full"])
    (remedy,) = re.findall(r"units=\[(\w+)\]", str(error.value))
    assert f"1 × {remedy}" in str(error.value)
    assert find_units(model, [remedy], ["compile=layer"]).modules
    with pytest.raises(ConfigError, match=r"^compile=layer acts on the layers that repeat, and units=\[\] names none"):
        find_units(model, [], ["compile=layer"])


def test_one_piece() -> None:
    units = find_units(Translator(), [])
    assert (units.modules, units.covered, units.share) == ((), 0, 0.0)
    assert str(units).startswith("none, with 0.0% of ")


def test_nothing_to_learn_is_no_error() -> None:
    units = find_units(nn.Sequential(nn.ReLU()))
    assert (units.modules, units.total, units.share) == ((), 0, 0.0)


def test_tied_parameters_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 8)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.blocks[1].up.weight = self.blocks[0].up.weight
            self.head = nn.Linear(8, 8, bias=False)
            self.head.weight = self.embedding.weight

    units = find_units(Tied(), needed_by=["compile=layer"])
    assert units.covered == 2 * count(Block()) - 8 * 32
    assert units.total == units.covered + 64
    assert find_units(Tied()).modules == ()


def test_a_layer_that_shares_weights_is_not_sharded_by_itself() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.blocks[1].norm = self.blocks[0].norm
            self.norm = self.blocks[2].norm

    assert [name for name, _ in find_units(Shares()).modules] == ["blocks.3"]
