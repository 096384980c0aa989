"""What all commands share: how they fail, what they print, where optional modules and the device come from."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Failure(Exception):
    """Ends the command with a message on stderr and ``status``."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


def need(name: str) -> Any:
    """Import a module of the ``cli`` extra.

    Raises:
        Failure: it is not there; the message says what installs it.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: soundfile without its C library
        raise Failure(f'this needs {name} ({error}): pip install "flashmel[cli]"', status=1) from error


def printable(path: Path) -> str:
    """A path that can be printed, also where its name is not valid UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def progress(items: Iterable[T], total: int, unit: str) -> tuple[Iterable[T], Callable[..., Any]]:
    """The items under a progress bar, if tqdm is there and stderr a terminal; and what prints a line above it."""
    try:
        bar = importlib.import_module("tqdm").tqdm(items, total=total, unit=unit, disable=None)  # None: by the terminal
    except ImportError:
        return items, print
    return bar, bar.write


def device_of(name: str | None) -> torch.device:
    """The device of ``--device``; by default a GPU if there is one.

    Raises:
        Failure: it is not here, or flashmel does not run on its kind.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
        if found.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError("expected cpu, cuda, cuda:N or mps")
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has no one type for an absent device
        raise Failure(f"--device {name}: {str(error).splitlines()[0]}") from error
    return found


def device_name(device: torch.device) -> str:
    """A device, and which it is."""
    if device.type != "cuda":
        return f"{device} ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} ({torch.cuda.get_device_name(device)}, sm_{major}{minor})"
