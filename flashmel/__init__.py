"""Mel spectrograms in one CUDA kernel launch, and the same numbers without a GPU."""

from .environment import configure
from .jit.bundle import bundle_variants, has_bundle, load_bundle, loaded_bundles
from .transform import MelSpectrogram
from .version import __version__

__all__ = ["MelSpectrogram", "__version__", "bundle_variants", "configure", "has_bundle", "load_bundle", "loaded_bundles"]
