"""Buffers that hold tables: never half precision, absent from checkpoints at will, safe on the meta device."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

# Of a buffer, by device: its state, and the copy that DataParallel made of it then.
_copies: MutableMapping[Tensor, dict[torch.device, tuple[tuple[int, int], Tensor]]] = WeakTensorKeyDictionary()


def refuse_scripting(module: nn.Module) -> None:
    """What torch.jit.script asks of a module first."""
    raise RuntimeError(
        f"torch.jit.script cannot compile {type(module).__name__}: call torch.jit.trace(module, waveform), torch.export.export or "
        "torch.compile"
    )


class Tables(nn.Module):
    """A module whose buffers stay float32 or float64, may be absent from a checkpoint, and survive the meta device."""

    __prepare_scriptable__ = refuse_scripting

    def __init__(self, *, persistent: bool = True, **tables: Tensor) -> None:
        super().__init__()
        self._unmaterialised: dict[str, Tensor] = {}
        for name, table in tables.items():
            device = torch.get_default_device() if table.device.type == "cpu" else table.device
            if device.type == "meta":
                self._unmaterialised[name] = table
            with torch.inference_mode(False):  # inference tensors do not say when they change
                self.register_buffer(name, table.to(device).clone(), persistent=persistent)

    @torch.inference_mode(False)
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Tables:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is None or new is None:
                continue
            if old.is_meta and not new.is_meta and name in self._unmaterialised:
                self._buffers[name] = self._unmaterialised.pop(name).to(new.device, new.dtype)
            elif new.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = old.to(new.device)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_is_replica") and (original := self._buffers.get(name)) is not None:
            value = _kept_copy(original, value)
        super().__setattr__(name, value)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, own, unexpected_keys, error_msgs)
        # Keys that a checkpoint lacks are not reported: the buffer keeps what the arguments gave it.


def _kept_copy(original: Tensor, copy: Tensor) -> Tensor:
    """DataParallel copies all buffers at each call. The first copy on a device stands in for the later ones as long as the original
    is what it was: kernel tables are made once for each tensor, and to make them is to wait for the GPU."""
    if copy is original or original.is_inference() or original.requires_grad:
        return copy
    state, by_device = (original.data_ptr(), original._version), _copies.setdefault(original, {})
    if copy.device not in by_device or by_device[copy.device][0] != state:
        by_device[copy.device] = state, copy
    return by_device[copy.device][1]


def table(module: Any, name: str) -> Tensor:
    """The module's attribute: without nn.Module's search for it, if it is still a buffer."""
    found: Tensor | None = module._buffers.get(name)
    return getattr(module, name) if found is None else found
