"""`ExecutedCode`: the Python code that runs in a trace, outside of torch's operators."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any


class ExecutedCode:
    """Records code by Python's profile hook.

    The hook is off inside operators, where most of a trace's time goes, and where another profiler
    is in use.

    Attributes:
        globals: globals of the first frame of each code object that ran.
    """

    def __init__(self) -> None:
        self.globals: dict[CodeType, dict[str, Any]] = {}
        self._is_recording = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self._is_recording = sys.getprofile() is None
        self.resume()
        try:
            yield
        finally:
            self.pause()
            self._is_recording = False

    def pause(self) -> None:
        if self._is_recording:
            sys.setprofile(None)

    def resume(self) -> None:
        if self._is_recording:
            sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code not in self.globals:
            self.globals[frame.f_code] = frame.f_globals
