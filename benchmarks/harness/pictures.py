"""Pictures for docs/."""

from __future__ import annotations

from pathlib import Path


def shrink(source: Path, target: Path) -> None:
    """Half as wide and high, in 64 colours."""
    from PIL import Image

    with Image.open(source) as picture:
        half = picture.convert("RGB").resize((picture.width // 2, picture.height // 2), Image.Resampling.LANCZOS)
        half.quantize(64).save(target, optimize=True)
