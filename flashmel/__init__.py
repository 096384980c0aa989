"""Mel spectrograms in one CUDA kernel launch, and the same numbers without a GPU."""

from . import frontends
from .cepstrum import MFCC, AmplitudeToDB
from .frontends import frontend
from .jit.bundle import load_bundle, loaded_bundles
from .transform import MelSpectrogram
from .version import __version__

__all__ = ["MFCC", "AmplitudeToDB", "MelSpectrogram", "__version__", "frontend", "frontends", "load_bundle", "loaded_bundles"]
