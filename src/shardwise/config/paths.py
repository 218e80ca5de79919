"""The folders of this repository and its conf/."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CONF = ROOT / "conf"
