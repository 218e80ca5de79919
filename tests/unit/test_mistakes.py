"""An exception in a module author's code is told by his frame and his line."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shardwise.launch.mistakes import tell


class Mistyped:
    def on_train_batch_end(self, outputs: Any) -> None: ...


def test_a_hook_that_takes_other_arguments_is_told_by_the_line_where_it_begins() -> None:
    with ThreadPoolExecutor() as pool:  # as Lightning's, its frames are no author's
        error: Any = pool.submit(Mistyped().on_train_batch_end, 1, 2, 3).exception()  # type: ignore[call-arg]
    said = tell(error, None)
    assert said is not None
    assert said.startswith(
        "error: TypeError: Mistyped.on_train_batch_end() takes 2 positional arguments but 4 were given\n"
    )
    assert "test_mistakes.py line 12: def on_train_batch_end(self, outputs: Any) -> None: ...\n" in said
