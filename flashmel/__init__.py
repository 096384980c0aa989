"""Mel spectrograms in one CUDA kernel launch, and the same numbers without a GPU."""

from . import frontends
from .frontends import frontend
from .jit.bundle import load_bundle, loaded_bundles
from .transform import MelSpectrogram
from .version import __version__

__all__ = ["MelSpectrogram", "__version__", "frontend", "frontends", "load_bundle", "loaded_bundles"]
