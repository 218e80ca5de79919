"""Keeps keys and passwords of the environment out of configs: `${oc.env:MY_KEY}` stays a reference in every file."""

from __future__ import annotations

import os
import re
from typing import Any

from shardwise.errors import ConfigError

_NAMED = re.compile("KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL")
_REFERENCE = re.compile(r"\$\{oc\.env:(\w+)\}")
_SHORTEST = 8  # a shorter value may stand in a text by chance
# The names of options that hold one: `api_key`, `hf_token`, `db.password`; not `sample_tokens` or `tokenizer`
_OPTION = re.compile(
    r"(?i)(^|[._-])(api_?key|access_?key|private_?key|secret\w*|password|passwd|pwd|passphrase|credentials?|bearer|auth"
    r"|(\w+_)?(token|key))$"
)
# Of a tokenizer and of samples, and no secret
_HARMLESS = re.compile("(eos|bos|pad|unk|mask|sep|cls|special)_token|(sort|image|text|label)_key")
# Of any text: what stands before the host of an address (`user:password`, whose password may have a / or @; `token`),
# what its query hands over, and what follows Bearer
SECRET_IN_TEXT = re.compile(
    r"""(?ix)
    (?<=://) (?: [^/\s:@?#"'<>]* : [^\s"'<>]+ | [^/\s:@?#"'<>]+ ) (?=@)
    | (?<=[?&]) (?P<name>
        (?: [\w.-]*[_.-] )? (?: \w*token|key|api_?key|secret|passw(?:or)?d|pwd|sig(?:nature)?|credential|auth) =
      ) [^&\s"'<>]+
    | (?P<scheme> \b bearer \s+ | \b authorization ["']? \s* [:=] \s* ["']? (?: \w+ \s+ )? ) (?! \s ) [\w.~+/=-]{8,}
    """
)
# Such an option holds a secret whatever it says. One named `token` or `key` may name a column
_ALWAYS = re.compile("(?i)(api_?key|access_?key|secret(_?key)?|password|passwd|pwd|passphrase)$")
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.+=-]{16,}")
_NODES = ("module", "model", "data", "callbacks", "loggers")  # what is built by calling classes of the user's


def environment_secrets() -> dict[str, str]:
    """The values of variables whose names say that they are keys or passwords."""
    return {name: value for name, value in os.environ.items() if _NAMED.search(name) and len(value) >= _SHORTEST}


def refer_to_secrets(config: dict[str, Any]) -> dict[str, Any]:
    """`config`, in whose arguments of classes each secret of the environment is replaced by `${oc.env:NAME}`."""
    secrets = environment_secrets()

    def refer(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: refer(item) for key, item in value.items()}
        if isinstance(value, list):
            return [refer(item) for item in value]
        if isinstance(value, str):
            for name, secret in secrets.items():
                value = value.replace(secret, f"${{oc.env:{name}}}")
        return value

    return config | {key: refer(config[key]) for key in _NODES if key in config} if secrets else config


def is_secret(name: str) -> bool:
    """Whether an option of this name holds a key or a password."""
    return _OPTION.search(name) is not None and _HARMLESS.fullmatch(name.rpartition(".")[2]) is None


def refuse_secrets(value: Any, where: str = "") -> None:
    """Look for keys and passwords in arguments of classes and in the cluster's environment.

    Raises:
        ConfigError: one stands there in clear, and would stand so in the files of the run.
    """
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else [(where, item) for item in value]:
            if where or key in (*_NODES, "cluster"):
                refuse_secrets(item, f"{where}.{key}".lstrip(".") if isinstance(value, dict) else where)
    elif isinstance(value, str) and _is_in_clear(value, where):
        remedy = (
            "leave it out, and export it in the shell that starts the run"
            if where.startswith("cluster.")
            else f"give '{where}=${{oc.env:NAME}}', where the environment has NAME, and NAME has KEY, TOKEN, SECRET or "
            f"PASSWORD in it"
        )
        raise ConfigError(f"{where} holds a key or a password, which config.yaml and plan.json would show: {remedy}")


def _is_in_clear(text: str, name: str) -> bool:
    text = _REFERENCE.sub("", text)
    if text and is_secret(name) and (_RANDOM.fullmatch(text) or (_ALWAYS.search(name) and text[0] not in "/~.<")):
        return True
    return any(found["name"] or found["scheme"] or ":" in found[0] for found in SECRET_IN_TEXT.finditer(text))


def read_secrets(text: str, where: str) -> str:
    """`text` with the values of the environment in place of its references.

    Raises:
        ConfigError: a variable is not set in this process.
    """

    def read(reference: re.Match[str]) -> str:
        name = reference[1]
        if name not in os.environ:
            raise ConfigError(f"{where}={text}: the environment has no {name} here; set it on every node")
        return os.environ[name]

    return _REFERENCE.sub(read, text)
