"""Mel spectrograms in one CUDA kernel launch, and the same numbers without a GPU."""

from . import frontends
from .cepstrum import MFCC, AmplitudeToDB
from .environment import configure
from .frontends import FrontEnd, frontend
from .jit.bundle import BundleError, bundle_variants, has_bundle, load_bundle, loaded_bundles
from .jit.driver import DriverError, MissingKernelError
from .stream import Stream
from .transform import MelSpectrogram
from .version import __version__

__all__ = [
    "MFCC",
    "AmplitudeToDB",
    "BundleError",
    "DriverError",
    "FrontEnd",
    "MelSpectrogram",
    "MissingKernelError",
    "Stream",
    "__version__",
    "bundle_variants",
    "configure",
    "frontend",
    "frontends",
    "has_bundle",
    "load_bundle",
    "loaded_bundles",
]
