# SPDX-License-Identifier: Apache-2.0
"""The exceptions of this package, as one tree: a class exists where a caller can act on it.

    NVFlareLazyError
    ├── ImmutableTensorError (RuntimeError)          an in-place write to a lazy tensor or array
    ├── SourceError (OSError)                        the bytes of a tensor cannot be read
    │   ├── TruncatedSourceError                     the file is shorter than when it was opened
    │   ├── SourceReleasedError                      the tensor's scratch was released
    │   └── UnsupportedTensorError                   no dense elements: sparse, quantized, meta
    ├── UnsupportedDtypeError (TypeError)            a dtype that the target format does not support
    ├── ScratchError (OSError)                       the scratch directory of a job cannot be used
    │   ├── QuotaExceededError                       more bytes than the job's quota
    │   ├── DiskFullError (SaveError)                no space left, or less than has to stay free
    │   ├── ScratchDeletedError                      the scratch directory was deleted while in use
    │   ├── ScratchPermissionError (PermissionError) owned by another user, or not safe to use
    │   └── ScratchReleasedError                     a write after the scratch was released
    ├── SaveError                                    a checkpoint was not written; the previous one is unchanged
    │   ├── UnserializableTensorError (TypeError)    not a tensor, or a tensor without dense bytes
    │   └── MetadataMismatchError (ValueError)       the tensors are not the ones that were announced
    ├── TransferError (RuntimeError)                 tensors were not transferred between processes
    │   ├── TransferAbortedError                     the job ended or was aborted
    │   ├── PeerLostError (ConnectionError)          the peer stopped, stalls, or released the tensors
    │   │   └── SegmentTimeoutError                  NVFlare's messages pass, but not requests for segments
    │   └── ProtocolError (ValueError)               damaged, false, repeated or missing tensors
    ├── UnsupportedNVFlareError (ImportError)        another version of NVFlare, or none, is installed
    ├── JobError (RuntimeError)                      a federated job cannot continue as configured
    │   ├── JobAdaptationError (ValueError)          a job's configuration cannot be adapted
    │   ├── InitialModelError                        the initial model is missing or unusable
    │   ├── JobCheckpointError                       the job's checkpoint cannot be written or resumed
    │   ├── ResultMismatchError (ValueError)         a client's result does not match the global model
    │   └── TooFewResultsError                       fewer usable results in a round than required
    ├── AggregationError                             contributions were not aggregated; there is no result
    │   ├── NothingToAggregateError (ValueError)     no contributor, or no tensor, is left
    │   ├── TooFewContributorsError (ValueError)     fewer contributors than the rule requires
    │   ├── WeightError (ValueError)                 a weight is missing, negative or not finite, or all are 0
    │   ├── MismatchError (ValueError)               names, shapes or dtypes of a contribution differ
    │   ├── NonFiniteError (ValueError)              NaN or infinity in a contribution
    │   ├── AggregationDtypeError (TypeError)        a dtype that the rule cannot compute with
    │   ├── MissingReferenceError (ValueError)       the rule requires the global model
    │   ├── MemoryBudgetError (ValueError)           the budget is too small for the smallest tiles
    │   ├── AggregationCancelledError                the caller cancelled the aggregation
    │   ├── ExecutorError                            the executor lost the same part of the work several times
    │   ├── SharedStorageError                       a worker does not see the files of the aggregation
    │   └── OptimizerStateError                      a server optimizer's state does not match the model
    └── FormatError (ValueError)                     a file breaks the rules of its format
        ├── UnknownFormatError                       not a checkpoint of a supported format
        ├── PyTorchCheckpointError                   a PyTorch checkpoint that is damaged or forged
        │   ├── ArchiveError                         its zip or tar archive is damaged, or holds something else
        │   ├── ForbiddenGlobalError                 its pickle names more than a state dict does
        │   └── SectionError (LookupError)           the requested section is missing
        ├── ModelDirectoryError                      a Hugging Face directory lacks a file, or does not match a model
        ├── SafetensorsError                         breaks a rule of the format, named by `rule`
        └── ShardError                               the files of a sharded checkpoint do not belong together
            ├── ShardIndexError                      the index is not JSON with a weight map
            └── MissingShardError                    a shard, or a tensor in a shard, is missing

Each message names the file, tensor or peer and the problem, and ends with the remedy if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from nvflare_lazy._text import message

#: The rules of the safetensors format, each by the name that `SafetensorsError.rule` has when it is broken.
SafetensorsRule = Literal[
    "header-truncated",  # the bytes end before the header does
    "header-too-large",  # the header is longer than the format, or the caller, allows
    "header-start",  # the header does not start with a brace
    "header-encoding",  # the header is not UTF-8, or spells out half a surrogate pair, which UTF-8 cannot hold
    "header-json",  # the header is not JSON, or not an object of objects
    "header-padding",  # something other than spaces follows the header's JSON
    "duplicate-key",  # the same key twice in one JSON object
    "too-many-tensors",  # more names than any model has: they would take far more memory than the file
    "invalid-metadata",  # `__metadata__` is not an object of strings
    "invalid-entry",  # a tensor's entry is not an object of exactly `dtype`, `shape` and `data_offsets`
    "unknown-dtype",  # a dtype that the format does not know
    "invalid-shape",  # a shape that is not a list of at most 64 non-negative integers
    "size-overflow",  # a shape whose elements or bytes cannot be counted in 63 bits
    "partial-byte",  # a tensor of a type narrower than a byte does not end on a whole byte
    "invalid-offsets",  # `data_offsets` is not a list of two non-negative integers, the smaller one first
    "tensor-size",  # the data offsets do not span the bytes that dtype and shape take
    "offset-gap",  # bytes between two tensors, or before the first, that belong to none
    "offset-overlap",  # two tensors share bytes
    "data-truncated",  # the file ends before its last tensor does
    "trailing-data",  # bytes after the last tensor
]


class NVFlareLazyError(Exception):
    """Base class of the exceptions of this package.

    Messages contain names and texts of clients and files. As text they are one line of at most some 2,000 characters,
    in which everything that is not printable is escaped.
    """

    def __str__(self) -> str:
        return message(super().__str__())


class ImmutableTensorError(NVFlareLazyError, RuntimeError):
    """An in-place write to a lazy tensor: its bytes belong to a file that other tensors read."""


class SourceError(NVFlareLazyError, OSError):
    """The bytes of a lazy tensor cannot be read."""


class TruncatedSourceError(SourceError):
    """The source is too short for the tensor: the file was truncated or replaced after it was opened."""


class SourceReleasedError(SourceError):
    """The tensor's bytes were released, for example by `LazyTensorDict.cleanup()`."""


class RemoteError(SourceError):
    """A remote file cannot be read or written: no access, no answer, or a server that lacks a feature."""


class RemoteNotFoundError(RemoteError, FileNotFoundError):
    """A remote file does not exist."""


class RemoteDirectoryError(RemoteError, IsADirectoryError):
    """A URL is that of a directory, where a file is required."""


class RemoteFileChangedError(RemoteError):
    """A remote file was replaced after it was opened; nothing of the new file was used."""


class MissingPackageError(NVFlareLazyError, ImportError):
    """An optional package is not installed; the message has the command that installs it."""


class UnsupportedDtypeError(NVFlareLazyError, TypeError):
    """A dtype that the target format (NumPy, safetensors) does not support."""


class UnsupportedTensorError(SourceError):
    """A tensor of a checkpoint has no dense elements to read: it is sparse, quantized or meta."""


class AggregationError(NVFlareLazyError):
    """Contributions could not be aggregated; no output was written."""


class NothingToAggregateError(AggregationError, ValueError):
    """No contributors or tensors were given, or all were skipped or excluded.

    Attributes:
        skipped: The error of each skipped contribution.
    """

    def __init__(self, message: str, skipped: Mapping[str, Exception] | None = None) -> None:
        super().__init__(message)
        self.skipped = dict(skipped or {})


class TooFewContributorsError(AggregationError, ValueError):
    """Fewer contributors than the rule requires."""


class WeightError(AggregationError, ValueError):
    """A weight is missing, negative or not finite, or all weights are zero."""


class MismatchError(AggregationError, ValueError):
    """A contribution has other tensors, shapes or dtypes than the others, or than the global model."""


class NonFiniteError(AggregationError, ValueError):
    """A contribution contains NaN or infinity."""


class AggregationDtypeError(AggregationError, TypeError):
    """A tensor has a dtype that the aggregation rule cannot compute with."""


class MissingReferenceError(AggregationError, ValueError):
    """The aggregation rule requires the global model, and it was not passed."""


class MemoryBudgetError(AggregationError, ValueError):
    """The memory budget is too small for the smallest tiles."""


class AggregationCancelledError(AggregationError):
    """The caller cancelled the aggregation."""


class ExecutorError(AggregationError):
    """An executor cannot be used, or lost the same part of an aggregation several times."""


class SharedStorageError(AggregationError):
    """A worker does not see the inputs or the unfinished output of an aggregation."""


class OptimizerStateError(AggregationError):
    """The stored state of a server optimizer does not belong to the model that it should update."""


class FormatError(NVFlareLazyError, ValueError):
    """A file or byte string breaks the rules of its format."""


class UnknownFormatError(FormatError):
    """The content is not a checkpoint of a supported format; the message describes it."""


class PyTorchCheckpointError(FormatError):
    """A PyTorch checkpoint cannot be opened: it is damaged or forged, or two of its tensors have one name."""


class ArchiveError(PyTorchCheckpointError):
    """The zip or tar archive of a checkpoint is damaged, compressed, ambiguous, or holds something else."""


class ForbiddenGlobalError(PyTorchCheckpointError):
    """The pickle names a function or class that is not part of a state dict; no code of it was run."""


class SectionError(PyTorchCheckpointError, LookupError):
    """The requested section is not in the checkpoint, or has no named tensors."""


class ModelDirectoryError(FormatError):
    """A Hugging Face directory lacks a file, or its names or shapes do not match those of a model or an adapter."""


class SafetensorsError(FormatError):
    """A safetensors file or header breaks a rule of the format.

    Attributes:
        rule: The rule, as one of the short names of `SafetensorsRule`, which do not change.
    """

    def __init__(self, rule: SafetensorsRule, message: str) -> None:
        super().__init__(rule, message)
        self.rule = rule

    def __str__(self) -> str:
        return message(self.args[1])


class ShardError(FormatError):
    """The files of a sharded checkpoint do not belong together: for example, two of them hold the same tensor."""


class ShardIndexError(ShardError):
    """The index of a sharded checkpoint is not a JSON object with a weight map."""


class MissingShardError(ShardError):
    """A file of a sharded checkpoint, or a tensor that it should contain, is missing."""


class SaveError(NVFlareLazyError):
    """A checkpoint was not written. The previous one is unchanged, and no other file was left."""


class UnserializableTensorError(SaveError, TypeError):
    """A value is not a tensor, or is a tensor without dense bytes (sparse, quantized, on the meta device)."""


class MetadataMismatchError(SaveError, ValueError):
    """A tensor is missing, incomplete, unexpected or written twice, or its shape or dtype was announced otherwise."""


class ScratchError(NVFlareLazyError, OSError):
    """The scratch directory of a job cannot be used."""


class QuotaExceededError(ScratchError):
    """More bytes than the scratch quota of the job."""


class DiskFullError(ScratchError, SaveError):
    """The disk, the user's disk quota or the limit on file sizes is full, or less is free than has to stay free."""


class ScratchDeletedError(ScratchError):
    """A scratch directory was deleted while a process used it."""


class ScratchPermissionError(ScratchError, PermissionError):
    """A scratch directory belongs to another user, or other users could change its contents."""


class ScratchReleasedError(ScratchError):
    """A write to scratch that was released, for example because the job was aborted."""


class TransferError(NVFlareLazyError, RuntimeError):
    """Tensors were not transferred from one process to another."""


class TransferAbortedError(TransferError):
    """The transfer was cancelled: the job ended, or its abort signal was triggered."""


class PeerLostError(TransferError, ConnectionError):
    """The peer no longer answers, or no longer has the tensors that it offered."""


class SegmentTimeoutError(PeerLostError):
    """The peer offers segments, but requests for them do not reach it; whole tensors are transferred instead."""


class ProtocolError(TransferError, ValueError):
    """The peer sent tensors that are damaged, false, repeated or missing; none of them is used."""


class UnsupportedNVFlareError(NVFlareLazyError, ImportError):
    """Another version of NVFlare than the supported ones is installed, or none."""


class JobError(NVFlareLazyError, RuntimeError):
    """A federated job cannot continue as configured."""


class JobAdaptationError(JobError, ValueError):
    """A job folder is malformed, or has a component that cannot be replaced at the level asked for."""


class InitialModelError(JobError):
    """The initial model of a job is missing, or cannot be opened or created."""


class JobCheckpointError(JobError):
    """A job's checkpoint cannot be written, or the job cannot resume from it."""


class ResultMismatchError(JobError, ValueError):
    """A client's result has other tensors, shapes or dtypes than the global model."""


class TooFewResultsError(JobError):
    """A round ended with fewer usable results than the job requires."""


class RecordsError(NVFlareLazyError, RuntimeError):
    """The records of a job cannot be read, or a newer version of nvflare-lazy wrote them."""
