# SPDX-License-Identifier: Apache-2.0
"""Every exception this package raises on purpose, one tree, so that one `except` can catch any branch of it.

    NVFlareLazyError
    ├── LazyTensorError
    │   ├── ImmutableTensorError (RuntimeError)      an in-place write to a lazy tensor or array
    │   ├── SourceError (OSError)                    the bytes behind a tensor cannot be read any more
    │   │   ├── TruncatedSourceError                 fewer bytes than the tensor's shape promises
    │   │   └── ReleasedSourceError                  the scratch it lived in has been given back
    │   └── UnsupportedDtypeError (TypeError)        a dtype that the asked-for form cannot hold
    └── FormatError (ValueError)                     a file is not what it claims to be

Each message names the file, tensor or peer it is about, and ends with what to do where there is something to do.
"""

from __future__ import annotations


class NVFlareLazyError(Exception):
    """Base of every error this package raises on purpose."""


class LazyTensorError(NVFlareLazyError):
    """A lazy tensor or array was used in a way it cannot serve."""


class ImmutableTensorError(LazyTensorError, RuntimeError):
    """An in-place write to a lazy tensor: its bytes belong to a file that others read too."""


class SourceError(LazyTensorError, OSError):
    """The bytes behind a lazy tensor cannot be read."""


class TruncatedSourceError(SourceError):
    """The source ended before the tensor did: the file was truncated or replaced after it was opened."""


class ReleasedSourceError(SourceError):
    """The tensor's bytes were released on purpose, for example by `LazyTensorDict.cleanup()`."""


class UnsupportedDtypeError(LazyTensorError, TypeError):
    """A dtype that the target form (NumPy, safetensors) has no place for."""


class FormatError(NVFlareLazyError, ValueError):
    """A file or byte string breaks the rules of its format."""
