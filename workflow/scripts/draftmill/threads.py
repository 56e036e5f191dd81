"""Threads that come as they are needed, and never hold up the end of the process.

The standard library's pool waits for all its threads when Python ends: with a full disk or a last fault,
that would be as long as the longest answer still on its way.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

STACK_BYTES = 512 * 1024  # of 1,024 threads only what they touch is real memory


class Threads:
    """Runs each given call in a thread; a call must not raise."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._idle = self._count = 0
        threading.stack_size(STACK_BYTES)

    def run(self, call: Callable[..., None], *arguments: Any) -> None:
        """Starts the call now, in an idle thread or a new one."""
        with self._lock:
            needed = self._idle == 0
            if needed:
                self._count += 1
            else:
                self._idle -= 1
        self._calls.put((call, arguments))
        if needed:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Lets idle threads end, now or when their call is done."""
        for _ in range(self._count):
            self._calls.put(None)

    def _work(self) -> None:
        while (given := self._calls.get()) is not None:
            call, arguments = given
            call(*arguments)
            del given, call, arguments  # an answer is not kept until the next one
            with self._lock:
                self._idle += 1
