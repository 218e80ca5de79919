"""In which hooks strategies that shard weights make them whole."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback

from recipes.image_classification.module import ImageClassifier
from recipes.language_modeling.module import LanguageModel
from shardwise.lightning_internals.hooks import OF_BATCHES, of_longer_than_batches, sees_whole_weights
from shardwise.plan.rules import HOOKS_WITH_WEIGHTS


class Own(LightningModule):
    def on_train_start(self) -> None: ...

    @torch.no_grad()
    def on_validation_epoch_end(self) -> None: ...

    def on_save_checkpoint(self, checkpoint: Any) -> None: ...

    def on_train_batch_end(self, *args: Any) -> None: ...

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


class Says(Callback):
    whole_weights_in = ("on_train_batch_end",)

    def on_train_start(self, *args: Any) -> None: ...

    def on_train_batch_end(self, *args: Any) -> None: ...


def test_the_hooks_of_a_run_of_an_epoch_of_a_validation_and_of_a_checkpoint_see_whole_weights() -> None:
    for hook, whole in {
        "on_train_start": True, "on_validation_epoch_end": True, "on_save_checkpoint": True,
        "on_train_batch_end": False, "on_before_optimizer_step": False,
        "on_fit_start": False,  # it has none
    }.items():  # fmt: skip
        assert sees_whole_weights(Own(), hook, None) is whole, hook
    assert sees_whole_weights(LambdaCallback(on_fit_end=lambda *_: None), "on_fit_end", None)
    assert not sees_whole_weights(EarlyStopping("x"), "on_validation_end", None)
    for recipe in (LanguageModel, ImageClassifier):  # whose hooks look at none
        assert recipe.whole_weights_in == ()


def test_a_module_a_callback_and_the_command_line_choose_others() -> None:
    assert not sees_whole_weights(Says(), "on_train_start", None)
    assert sees_whole_weights(Says(), "on_train_batch_end", None)
    assert not sees_whole_weights(Says(), "on_train_batch_end", ())
    assert sees_whole_weights(Own(), "on_train_batch_end", ("on_train_batch_end",))
    assert not sees_whole_weights(Own(), "on_train_start", ("on_train_batch_end",))


def test_each_hook_that_can_be_chosen_comes_where_weights_may_be_whole() -> None:
    assert {hook for hook in HOOKS_WITH_WEIGHTS if not of_longer_than_batches(hook)} == set(OF_BATCHES)
