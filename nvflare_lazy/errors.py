# SPDX-License-Identifier: Apache-2.0
"""Every exception this package raises on purpose, one tree, so that one `except` can catch any branch of it.

    NVFlareLazyError
    ├── LazyTensorError
    │   ├── ImmutableTensorError (RuntimeError)      an in-place write to a lazy tensor or array
    │   ├── SourceError (OSError)                    the bytes behind a tensor cannot be read any more
    │   │   ├── TruncatedSourceError                 fewer bytes than the tensor's shape promises
    │   │   └── ReleasedSourceError                  the scratch it lived in has been given back
    │   └── UnsupportedDtypeError (TypeError)        a dtype that the asked-for form cannot hold
    ├── ScratchError (OSError)                       the disk a run may use cannot be used as asked
    │   ├── QuotaExceededError                       more bytes than the job's quota
    │   ├── DiskFullError                            no space left, or less than has to stay free
    │   ├── ScratchGoneError                         a scratch directory was deleted underneath
    │   ├── ScratchPermissionError (PermissionError) not ours to use, or not safe to use
    │   ├── ReleasedScratchError                     a write after the scratch was given back
    │   └── ForkedScratchError                       used in a forked child, which does not own it
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


class ScratchError(NVFlareLazyError, OSError):
    """The scratch space cannot be used as asked."""


class QuotaExceededError(ScratchError):
    """More bytes than the job may keep on disk."""


class DiskFullError(ScratchError):
    """The file system has no space left, or less than the free-space guard wants to keep."""


class ScratchGoneError(ScratchError):
    """A scratch directory was deleted underneath the process that leased it."""


class ScratchPermissionError(ScratchError, PermissionError):
    """A scratch directory belongs to somebody else, or others could change what is in it."""


class ReleasedScratchError(ScratchError):
    """The scratch was given back, by an abort for one; what is being written to it is not wanted any more."""


class ForkedScratchError(ScratchError):
    """A forked child used the scratch of its parent, which owns it."""
