"""A key of the environment reaches the class that needs it, and no file of the run."""

from pathlib import Path
from typing import Any

import pytest

from shardwise.config.compose import compose
from shardwise.config.targets import build
from shardwise.errors import ConfigError
from shardwise.run_dir.events import append_event, redact, redact_text, redact_words
from shardwise.run_dir.files import EVENTS
from tests.harness.commands import check, run

SECRET = "sk-0123456789"
WORDS = [
    "recipe=custom", f"module._target_={__name__}.Keyed", "+module.address=http://me:${oc.env:MY_API_KEY}@there",
    "+module.key=${oc.env:MY_API_KEY}", "+module.other=${oc.env:HOME}",
]  # fmt: skip


class Keyed:
    def __init__(self, key: str, address: str, other: str) -> None:
        self.given = (key, address, other)


def test_files_have_a_reference_and_the_class_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.setenv("HOME", "/home/me")
    [job] = compose(WORDS).jobs
    assert SECRET not in job.yaml and SECRET not in str(job.config.module)
    assert job.config.module["key"] == "${oc.env:MY_API_KEY}" and job.config.module["other"] == "/home/me"
    assert build(job.config.module, "module").given == (SECRET, f"http://me:{SECRET}@there", "/home/me")


def test_a_node_without_the_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="module.key=.*the environment has no MY_API_KEY here; set it on every node"):
        build({"_target_": f"{__name__}.Keyed", "key": "${oc.env:MY_API_KEY}"}, "module")


@pytest.mark.parametrize(
    "word",
    [
        "module.password=blue-fish",
        "data.db.api_key=blue-fish",
        "module.hf_token=hf_blue4fish9blue4",
        "module.list=[a,http://me:blue@h]",
        "data.url='https://h/?token=blue'",
        "cluster.environment.WANDB_API_KEY=blue",
        "data.run='curl -H \"Authorization: Bearer bluefish\"'",
    ],
)
def test_a_secret_in_clear_is_refused_and_not_repeated(word: str) -> None:
    said = r"^(module|data|cluster)\.[\w.]+ holds a key or a password.*: (give '|leave)"
    with pytest.raises(ConfigError, match=said) as caught:
        compose(["recipe=custom", f"module._target_={__name__}.Keyed", f"+{word}"])
    assert "blue" not in str(caught.value) and word.partition("=")[0] in str(caught.value)


def test_what_only_resembles_a_secret_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    words = [
        "input_key=input_ids", "start_token='<|endoftext|>'", "private_key=/home/me/.ssh/id_ed25519",
        "password=${oc.env:MY_API_KEY}", "auth='https://me:${oc.env:MY_API_KEY}@h'", "url='ssh://git@h/a'",
    ]  # fmt: skip
    [job] = compose([*WORDS[:2], *(f"+module.{word}" for word in words)]).jobs
    assert job.config.module["password"] == "${oc.env:MY_API_KEY}"


def test_no_file_of_a_run_has_it(tmp_path: Path) -> None:
    """Not the checkpoint either, whose hyperparameters the module has saved."""
    (tmp_path / "keyed.py").write_text(MODULE)
    words = ["recipe=custom", "module._target_=keyed.Keyed", "+module.api_key=${oc.env:MY_API_KEY}", "units=[]",
             "micro_batch_size=4", "global_batch_size=4", "max_steps=2", "accelerator=cpu", "name=keyed"]  # fmt: skip
    done: Any = check(run(tmp_path, *words, MY_API_KEY=SECRET))
    assert f"got {SECRET[:2]} and {len(SECRET)}" in done.stdout
    files = [path for path in (tmp_path / "runs" / "keyed").rglob("*") if path.is_file()]
    assert any(path.name == "trainer.pt" for path in files)
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    "text",
    [
        "https://{}@host/a", "redis://:{}@host", "https://me:{}@host:80/a?b=c", "https://host/a?token={}&b=c",
        "https://host/?b=c&api_key={}", "https://host/?X-Amz-Signature={}", "pwd={} x", "Authorization: Bearer {}",
        "bearer {}", "{{'Authorization': 'Basic {}'}}", "password: {}", "a postgres://me:{}@host/db b",
    ],
)  # fmt: skip
@pytest.mark.parametrize("secret", ["blue-fish", "blue/fish", "blue.fish~fish="])
def test_secrets_of_every_form_are_hidden_in_texts(tmp_path: Path, text: str, secret: str) -> None:
    if secret == "blue/fish" and text.startswith("https://{}"):
        secret = "bluefish"  # a token alone that has a / is a host and its path
    said = text.format(secret)
    append_event(tmp_path, "error", None, said)
    for hidden in (redact_text(said), (tmp_path / EVENTS).read_text()):
        assert "fish" not in hidden and "blue" not in hidden and "***" in hidden
    if "://" in said or "earer" in said:
        assert "fish" not in redact({"a": [said]})["a"][0] and "fish" not in redact_words([f"a={said}"])[0]


def test_a_password_with_an_at_sign_is_hidden_whole() -> None:
    assert redact_text("postgres://me:sword@fish/x@host/db, then") == "postgres://***@host/db, then"


def test_what_is_no_secret_stays() -> None:
    for text in (
        "https://host:80/a/b?page=2",
        "s3://bucket/key",
        "tokens: 5",
        "the bearer of news",
        "a@b.c",
        "{'key': 5}",
    ):
        assert redact_text(text) == text


MODULE = """
import torch
from lightning import LightningModule


class Keyed(LightningModule):
    def __init__(self, api_key):
        super().__init__()
        self.save_hyperparameters()
        print(f"got {api_key[:2]} and {len(api_key)}", flush=True)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, 4), 4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""
