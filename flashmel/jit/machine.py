"""What this machine can run: architectures of its GPUs and the CUDA version of its driver, from the driver itself.

The driver decides what CUDA_VISIBLE_DEVICES means, so that names of GPUs and of MIG instances, which are not numbers, need no
reading here. Asking makes no CUDA context; like any use of the driver it must not come before a fork of processes that use CUDA.
"""

from __future__ import annotations

from typing import NamedTuple


class Machine(NamedTuple):
    """``archs`` is empty without a GPU, ``cuda`` None without a driver."""

    archs: tuple[str, ...]  # "sm_90", each once
    cuda: int | None  # the newest major version whose cubins the driver takes

    def refusal(self, arch: str, cuda: int) -> str | None:
        """Why a cubin for ``arch``, of a compiler of CUDA ``cuda``, is of no use here; None if it is. Without a GPU, any may be."""
        if self.archs and arch not in self.archs:
            return f"not for {', '.join(self.archs)}"
        if self.cuda is not None and cuda > self.cuda:
            return f"it needs a driver for CUDA {cuda}, this one is for CUDA {self.cuda}"
        return None


def this_machine() -> Machine:
    """The visible GPUs and the driver, as they are now."""
    try:
        from cuda.bindings import driver

        (status,) = driver.cuInit(0)
    except Exception:  # no bindings, no driver library; whatever a broken installation raises
        return Machine((), None)
    if int(status) != 0:
        return Machine((), None)
    _, version = driver.cuDriverGetVersion()
    attribute = driver.CUdevice_attribute
    which = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    _, count = driver.cuDeviceGetCount()
    found: dict[str, None] = {}
    for ordinal in range(count):
        _, device = driver.cuDeviceGet(ordinal)
        major, minor = (driver.cuDeviceGetAttribute(a, device)[1] for a in which)
        found[f"sm_{major}{minor}"] = None
    return Machine(tuple(found), version // 1000)
