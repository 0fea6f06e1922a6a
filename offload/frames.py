"""Where the user's own code is: the line that an error, or a task, names.

torch/..., offload/..., <frozen ...>     never it
site-packages/...                        of an error only if nothing else is on the way
"""

import os
import sys
from types import FrameType, TracebackType

import torch

TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(__file__) + os.sep
INSTALLED = f"{os.sep}site-packages{os.sep}"


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """The innermost line that is neither torch's nor ours."""
    frame = frame or sys._getframe(1)
    while frame is not None and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_foreign(file: str) -> bool:
    return file.startswith((TORCH, OURS, "<"))


def say_frame(frame: FrameType | None, short: bool = False) -> str:
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    file = os.path.basename(file) if short else file
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"


def say_traceback(traceback: TracebackType | None) -> str:
    """The innermost line of the user's, rather than one of a library that they call."""
    where, own = "in the step", ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not is_foreign(code.co_filename):
            where = f"{code.co_filename}:{traceback.tb_lineno} in {code.co_name}"
            own = own if INSTALLED in code.co_filename else where
        traceback = traceback.tb_next
    return own or where
