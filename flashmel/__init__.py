"""Mel spectrograms in one CUDA kernel launch, and the same numbers without a GPU."""

from .transform import MelSpectrogram
from .version import __version__

__all__ = ["MelSpectrogram", "__version__"]
