"""Finds the line of the user's own code that an error or a task names.

torch/..., offload/..., trainers/..., <frozen ...>   never named
"""

import os
import sys
from types import FrameType

import torch

TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
OUR_TRAINERS = os.path.join(os.path.dirname(OURS.rstrip(os.sep)), "trainers") + os.sep


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """The innermost frame that is neither torch's nor ours."""
    frame = frame or sys._getframe(1)
    while frame is not None and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_foreign(file: str) -> bool:
    return file.startswith((TORCH, OURS, OUR_TRAINERS, "<"))


def format_frame(frame: FrameType | None, short: bool = False) -> str:
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    file = os.path.basename(file) if short else file
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
