"""Adds up the energy that the GPUs of a run have taken since its first start, in `energy.json`."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from shardwise.run_dir.files import ENERGY, write_whole
from shardwise.run_dir.reading import read_json

_SECONDS = 10.0  # between two writes: a process that is killed loses no more than this
_JOULES_PER_KWH = 3.6e6


class Energy:
    """The joules of all GPUs and the loss weight (tokens, samples) of the steps that they were for.

    Steps that were lost in a crash and made again count twice, in both numbers. Rank 0 keeps this.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / ENERGY
        self.joules = self.weight = 0.0
        self._weight_before = 0.0  # of earlier processes
        self._written = 0.0

    def read(self) -> None:
        """Take up what earlier processes of the run have written."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            earlier = read_json(self.path)
            self.joules, self._weight_before = float(earlier["joules"]), float(earlier["loss_weight"])

    def add(self, joules: float, weight: float) -> None:
        """`joules`: of all GPUs since the last call. `weight`: of all steps of this process so far."""
        self.joules += joules
        self.weight = self._weight_before + weight
        if time.monotonic() - self._written > _SECONDS:
            self.write()

    def write(self) -> None:
        """Write the sum, if there is any: a run on the CPU has none."""
        if not self.joules:
            return
        self._written = time.monotonic()
        with suppress(OSError):  # a folder that cannot be written to is reported at the next save
            numbers = {"joules": round(self.joules, 1), "loss_weight": self.weight}
            write_whole(self.path, json.dumps(numbers) + "\n", synced=False)

    @property
    def kwh(self) -> float | None:
        """None: no GPU has told its energy."""
        return self.joules / _JOULES_PER_KWH or None

    @property
    def joules_per_weight(self) -> float | None:
        return self.joules / self.weight if self.joules and self.weight else None
