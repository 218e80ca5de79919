"""What a checkpoint's plain part takes and gives back, and what it does not."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import io
import math
import pathlib
import pickle
import types
import zoneinfo
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st
from torch import nn

from shardwise.checkpoint import encoding
from shardwise.checkpoint.encoding import KIND, NotPlainError, decode, encode
from shardwise.checkpoint.plain import Packed, pack, unpack, write_down


class Color(enum.Enum):
    red = 1
    crimson = 1  # noqa: PIE796 # an alias
    blue = "b"


class Number(enum.IntEnum):
    one = 1


class Flags(enum.Flag):
    a = enum.auto()
    b = enum.auto()


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Box:
    corner: Any
    size: float = 1.0

    def __post_init__(self) -> None:
        self.made = True


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    values: Any


class Thing:
    """Not plain data."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


class Locked:
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def through_a_file(value: Any) -> Any:
    held = io.BytesIO()
    torch.save(value, held)
    held.seek(0)
    return torch.load(held, weights_only=True)


def there_and_back(value: Any) -> Any:
    return decode(through_a_file(encode(value)))


def same(one: Any, other: Any) -> bool:
    """Of the same types all the way down, and equal; NaN is NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.requires_grad == other.requires_grad and torch.equal(one, other)
    if isinstance(one, (np.ndarray, np.generic)):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.dtype.kind == "O":
            return all(map(same, one.ravel(), other.ravel()))
        return one.tobytes() == other.tobytes() and (
            not isinstance(one, np.ndarray) or (one.flags.c_contiguous == other.flags.c_contiguous)
        )
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one, other)) and all(map(same, one.values(), other.values()))
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one):
        return same(encoding.attributes_of(one), encoding.attributes_of(other))
    return bool(one == other)


VALUES: list[Any] = [
    None, True, 0, -(2**70), 2**5000, -(2**5000), 1.5, math.inf, math.nan, 2 + 3j, "text", "", b"", b"\0\xff",
    bytearray(b"ab"), bytearray(),
    [1, [2, (3, {"a": None})]], (), (1,), {1: "a", "1": "b", None: 0, (1, 2): 3, 1.5: 4}, {KIND: "not ours"},
    {Color.red: 1, Point(1, 2): 2, frozenset({3}): 3, np.int64(4): 5}, {1, "a", Color.blue, (1, 2)}, set(),
    frozenset({1}),
    collections.OrderedDict([("b", 1), ("a", 2)]), collections.Counter("aab"),
    collections.defaultdict(list, {"a": [1]}), collections.defaultdict(None, {"a": 1}), collections.deque([1, 2], 2),
    torch.arange(6.0).view(2, 3), torch.tensor(3, dtype=torch.int8), torch.ones(2, dtype=torch.bfloat16),
    torch.ones(0, 3), torch.tensor([1 + 2j]).conj(), nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True),
    torch.arange(4)[1::2], torch.Size([2, 3]), torch.float16, torch.device("cuda", 1),
    np.arange(6, dtype=np.int16).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.ones((0, 2)),
    np.array(["a", "bcd"]), np.array([b"x"]), np.array([True]), np.array([[1, "a"], [None, {2}]], dtype=object),
    np.array([(1, 2.5, "x")], dtype=[("a", "i4"), ("b", "f8"), ("c", "U3")]), np.array(["2026-01-02"], "datetime64[D]"),
    np.array(3.5), np.zeros(2, dtype=[("grid", "f4", (2, 2))]), np.float32(1.5), np.int64(-3), np.bool_(True),
    np.str_("a"), np.complex64(1j), np.datetime64("2026-01-02T03:04", "m"), np.timedelta64(3, "D"),
    np.float64(math.nan),
    datetime.date(2026, 1, 2), datetime.time(1, 2, 3, 4), datetime.timedelta(days=-1, microseconds=3),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    datetime.time(1, tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=30), "IST")),
    Path("a/b"), pathlib.PurePosixPath("/a"), pathlib.PureWindowsPath("c:\\a"), range(3, 9, 2), slice(None, 3, None),
    Color.red, Color.crimson, Color.blue, Number.one, Flags.a, Flags.a | Flags.b, Flags(0), Point([1], Color.red),
    Box({"a": np.ones(1)}), Frozen((1, Point(2, 3))), [Box(Frozen(Box(None)))],
    types.SimpleNamespace(a=1, b=[Color.red]), argparse.Namespace(lr=0.1),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    assert same(there_and_back(value), value)
    assert same(there_and_back([{"deep": (value,)}]), [{"deep": (value,)}])


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False) | st.datetimes() | st.dates() | st.timedeltas() | st.sampled_from(Color)
    | numpy_st.arrays(numpy_st.scalar_dtypes(), numpy_st.array_shapes(min_side=0, max_dims=3, max_side=3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    | st.tuples(inner, inner) | st.builds(Point, inner, inner) | st.builds(Frozen, inner)
    | st.lists(inner, max_size=3).map(collections.deque),
    max_leaves=12,
)  # fmt: skip


@given(plain_values)
@settings(max_examples=150, deadline=None)
def test_whatever_is_made_of_plain_data_comes_back(value: Any) -> None:
    assert same(there_and_back(value), value)


def test_what_changes_later_does_not_reach_what_was_packed() -> None:
    tensor, array, listed = torch.zeros(2), np.zeros(2), [1]
    packed = pack({"a": {"t": tensor, "n": array, "l": listed}}, {})
    tensor += 1
    array += 1
    listed.append(2)
    found, _ = unpack(through_a_file(write_down(packed)), None)
    assert same(found, {"a": {"t": torch.zeros(2), "n": np.zeros(2), "l": [1]}})


def test_no_code_of_a_dataclass_runs_and_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    written = encode({"box": Box(1), "color": Color.red, "point": Point(1)})
    monkeypatch.setattr(Box, "__post_init__", lambda self: pytest.fail("was run"))
    monkeypatch.setattr(Box, "__init__", lambda self: pytest.fail("was run"))
    assert decode(written)["box"].made
    for place in ("nowhere.at.all:Box", "shardwise.checkpoint.plain:pack", "subprocess:Popen", f"{__name__}:Thing"):
        for key in ("box", "color", "point"):
            with pytest.raises(NotPlainError, match="no imported module has"):
                decode({**written[key], "class": place})


def everything_else() -> dict[str, Any]:
    itself: list[Any] = []
    itself.append(itself)
    return {
        "plain": 1,
        "settings": {"size": 3, "thing": Thing(1)},
        "callbacks": {"Mine": {"count": 2, "thing": Thing([2]), "locked": Locked()}},
        "lr_schedulers": [{"last_epoch": 3, "own": Thing(4)}],
        "itself": itself,
        "hyper_parameters": {"lr": 0.1, "net": Thing(5)},
    }


DEPTHS = {"callbacks": 2, "lr_schedulers": 2, "hyper_parameters": 1}


def test_what_is_not_plain_data_is_left_out_by_key() -> None:
    packed = pack(everything_else(), DEPTHS, quiet=("hyper_parameters",))
    thing = f"{__name__}.Thing"
    assert [str(left) for left in packed.left_out] == [
        f"settings ({thing})", f"callbacks.Mine.thing ({thing})", f"callbacks.Mine.locked ({__name__}.Locked)",
        f"lr_schedulers.0.own ({thing})", "itself (list that holds itself)",
    ]  # fmt: skip
    assert [left.pickled for left in packed.left_out] == [True, True, False, True, True]
    kept = {"plain": 1, "callbacks": {"Mine": {"count": 2}}, "lr_schedulers": [{"last_epoch": 3}],
            "hyper_parameters": {"lr": 0.1}}  # fmt: skip
    found, missing = unpack(through_a_file(write_down(packed)), None)
    assert found == kept
    assert list(missing) == [
        "settings",
        "callbacks.Mine.thing",
        "callbacks.Mine.locked",
        "lr_schedulers.0.own",
        "itself",
    ]


def test_with_trust_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(everything_else(), DEPTHS, quiet=("hyper_parameters",))
    pickles = pickle.loads(pickle.dumps(packed.pickles))
    found, missing = unpack(through_a_file(write_down(packed)), pickles)
    assert found["settings"] == {"size": 3, "thing": Thing(1)} and found["callbacks"]["Mine"]["thing"] == Thing([2])
    assert found["lr_schedulers"] == [{"last_epoch": 3, "own": Thing(4)}] and found["itself"][0] is found["itself"]
    assert list(missing) == ["callbacks.Mine.locked"] and "could not be pickled" in missing["callbacks.Mine.locked"]
    monkeypatch.delattr(f"{__name__}.Thing")
    _, missing = unpack(through_a_file(write_down(packed)), pickles)
    assert "AttributeError" in missing["settings"]


def test_a_tensor_inside_is_kept_without_its_hooks() -> None:
    """As of a metric that holds a step's losses, into whose backward pass DeepSpeed has hooked."""
    tensor = (torch.ones(2, requires_grad=True) * 3).clone()
    tensor.register_hook(lambda gradient: gradient)
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.register_hook(lambda gradient: gradient)
    packed = pack({"settings": Thing([tensor, parameter])}, DEPTHS)
    found, missing = unpack(through_a_file(write_down(packed)), packed.pickles)
    first, second = found["settings"].value
    assert not missing and first.tolist() == [3, 3] and first.requires_grad and isinstance(second, torch.nn.Parameter)


def test_a_module_inside_is_kept_without_what_a_strategy_has_set_on_it() -> None:
    def own_hook(*_: Any) -> None: ...

    own_hook.__module__ = "deepspeed.runtime"
    layer = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    layer.register_forward_hook(own_hook)
    layer.post_bwd_fn = own_hook  # type: ignore[assignment]
    packed = pack({"settings": layer}, DEPTHS)
    found, missing = unpack(through_a_file(write_down(packed)), packed.pickles)
    assert not missing and isinstance(found["settings"][0], torch.nn.BatchNorm1d)
    assert not found["settings"]._forward_hooks and not hasattr(found["settings"], "post_bwd_fn")


def test_a_class_that_is_gone_takes_its_key_only(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack({"callbacks": {"Mine": {"a": 1, "b": Color.red}}, "c": Point(1), "d": 2}, DEPTHS)
    monkeypatch.setattr(encoding, "sys", types.SimpleNamespace(modules={}))
    found, missing = unpack(through_a_file(write_down(packed)), None)
    assert found == {"callbacks": {"Mine": {"a": 1}}, "d": 2}
    assert set(missing) == {"callbacks.Mine.b", "c"}


def test_content_written_before_is_read_as_it_is() -> None:
    before = {"loops": {"a": 1}, "callbacks": {"X": collections.OrderedDict(a=(1, {2}))}, "t": torch.ones(1)}
    found, missing = unpack(through_a_file(before), None)
    assert same(found, before) and not missing
    assert write_down(Packed({"a": 1}) | Packed({"b": 2})) == {"a": 1, "b": 2}
