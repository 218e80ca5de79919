"""The folders of this repository and its conf/, and how other processes find them."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CONF = ROOT / "conf"


def environment_with_source() -> dict[str, str]:
    """This process's environment, in which another Python finds shardwise where this one has."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}
