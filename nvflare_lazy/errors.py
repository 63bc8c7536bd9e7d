# SPDX-License-Identifier: Apache-2.0
"""Every exception this package raises on purpose, one tree, so that one `except` can catch any branch of it.

    NVFlareLazyError
    ├── LazyTensorError
    │   ├── ImmutableTensorError (RuntimeError)      an in-place write to a lazy tensor or array
    │   ├── SourceError (OSError)                    the bytes behind a tensor cannot be read any more
    │   │   ├── TruncatedSourceError                 fewer bytes than the tensor's shape promises
    │   │   ├── ReleasedSourceError                  the scratch it lived in has been given back
    │   │   └── UnsupportedTensorError               no dense elements in the file: sparse, quantized, meta
    │   └── UnsupportedDtypeError (TypeError)        a dtype that the asked-for form cannot hold
    ├── ScratchError (OSError)                       the scratch directory of a job cannot be used as asked
    │   ├── QuotaExceededError                       more bytes than the job's quota
    │   ├── DiskFullError (SaveError)                no space left, or less than has to stay free
    │   ├── ScratchGoneError                         a scratch directory was deleted underneath
    │   ├── ScratchPermissionError (PermissionError) not ours to use, or not safe to use
    │   └── ReleasedScratchError                     a write after the scratch was given back
    ├── SaveError                                    a checkpoint was not written; what was there before still is
    │   ├── UnsavableTensorError (TypeError)         not a tensor, or one that has no dense bytes
    │   └── PromiseError (ValueError)                a tensor is missing, incomplete, unexpected or not as promised
    ├── TransferError (RuntimeError)                 tensors did not get from one process to another
    │   ├── TransferAbortedError                     the job, or somebody in it, called it off
    │   ├── PeerLostError (ConnectionError)          the peer is gone, stalls, or has dropped the tensors
    │   │   └── SegmentsBlockedError                 something between lets NVFlare's messages pass, but not ours
    │   └── ProtocolError (ValueError)               the peer sent damaged, false, repeated or missing tensors
    ├── JobError (RuntimeError)                      a federated job cannot go on as configured
    │   ├── InitialModelError                        there is no model to begin with
    │   ├── JobCheckpointError                       the checkpoint of a job cannot be written or gone on from
    │   ├── UnfitResultError (ValueError)            a client's result does not fit the global model
    │   └── TooFewResultsError                       fewer usable results in a round than the job asks for
    ├── AggregationError                             contributions could not become one model; there is no result
    │   ├── NothingToAggregateError (ValueError)     no contributor, or no tensor, is left
    │   ├── TooFewContributorsError (ValueError)     fewer than the rule needs to keep its promise
    │   ├── WeightError (ValueError)                 a weight is missing, negative or not finite; or all are 0
    │   ├── DisagreementError (ValueError)           names, shapes or dtypes of a contribution differ
    │   ├── NonFiniteError (ValueError)              NaN or infinity in a contribution
    │   ├── UncomputableTensorError (TypeError)      a dtype that the rule cannot compute with
    │   ├── ReferenceNeededError (ValueError)        the rule needs the global model, and it was not given
    │   ├── MemoryBudgetError (ValueError)           a budget too small for even the smallest tiles
    │   ├── AggregationCancelledError                the caller called it off
    │   └── OptimizerStateError                      a server optimizer's state does not belong to the model
    └── FormatError (ValueError)                     a file is not what it claims to be
        ├── UnknownFormatError                       none of the kinds of file that can be opened
        ├── CheckpointError                          a PyTorch checkpoint that cannot be opened
        │   ├── ArchiveError                         the zip or tar around it is broken or plays tricks
        │   │   ├── CompressedRecordError            a record is compressed: it cannot be read in part
        │   │   ├── EncryptedRecordError             a record is encrypted
        │   │   ├── OverlappingRecordError           two records share bytes
        │   │   ├── DuplicateRecordError             two records have the same name
        │   │   ├── RecordNameError                  a record's name tries to leave the archive
        │   │   └── TorchScriptError                 a TorchScript program, which is code
        │   ├── MalformedPickleError                 its pickle is damaged, or larger in memory than on disk
        │   ├── ForbiddenGlobalError                 its pickle names what is not part of a state dict
        │   ├── StorageError (LookupError)           a storage that is not there, cut short or of another size
        │   ├── TensorGeometryError                  a tensor that reaches out of its storage
        │   ├── NameCollisionError                   two tensors whose joined names are the same
        │   └── SectionError (LookupError)           the section asked for is not there
        ├── SafetensorsError                         breaks a rule of the safetensors format, which `rule` names
        └── ShardError                               the files of a sharded checkpoint do not make a whole
            ├── ShardIndexError                      the index is not JSON with a weight map
            └── MissingShardError                    a shard, or a tensor in one, is not there

Each message names the file, tensor or peer it is about, and ends with what to do where there is something to do.
"""

from __future__ import annotations

from typing import Literal

#: The rules of the safetensors format, each by the name that `SafetensorsError.rule` has when it is broken.
SafetensorsRule = Literal[
    "header-truncated",  # the bytes end before the header does
    "header-too-large",  # the header is longer than the format, or the caller, allows
    "header-start",  # the header does not begin with a brace
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


class UnsupportedTensorError(SourceError):
    """A tensor of a checkpoint has no dense elements that could be read: it is sparse, quantized or meta."""


class AggregationError(NVFlareLazyError):
    """Contributions could not be aggregated; nothing of the result was left behind."""


class NothingToAggregateError(AggregationError, ValueError):
    """There is no contributor, or no tensor, or none is left."""


class TooFewContributorsError(AggregationError, ValueError):
    """Fewer contributors than the rule needs to keep its promise."""


class WeightError(AggregationError, ValueError):
    """A weight that is missing, negative or not finite; or all weights are zero."""


class DisagreementError(AggregationError, ValueError):
    """A contribution has other tensors, shapes or dtypes than the others, or than the global model."""


class NonFiniteError(AggregationError, ValueError):
    """A contribution contains NaN or infinity."""


class UncomputableTensorError(AggregationError, TypeError):
    """A tensor of a dtype that the aggregation rule cannot compute with."""


class ReferenceNeededError(AggregationError, ValueError):
    """The aggregation rule needs the global model, and it was not given."""


class MemoryBudgetError(AggregationError, ValueError):
    """The memory budget is too small for even the smallest tiles."""


class AggregationCancelledError(AggregationError):
    """The caller called the aggregation off."""


class OptimizerStateError(AggregationError):
    """The state of a server optimizer on the disk does not belong to the model it should update."""


class FormatError(NVFlareLazyError, ValueError):
    """A file or byte string breaks the rules of its format."""


class UnknownFormatError(FormatError):
    """The content is none of the kinds of file that can be opened; the message says what it looks like."""


class CheckpointError(FormatError):
    """A PyTorch checkpoint that cannot be opened."""


class ArchiveError(CheckpointError):
    """The zip or tar archive around a checkpoint is broken, plays tricks, or holds something else."""


class CompressedRecordError(ArchiveError):
    """A record is compressed: it cannot be read in part, and may be a bomb."""


class EncryptedRecordError(ArchiveError):
    """A record is encrypted."""


class OverlappingRecordError(ArchiveError):
    """Two records, or a record and the archive's directory, share bytes."""


class DuplicateRecordError(ArchiveError):
    """Two records have the same name: readers would differ on which one counts."""


class RecordNameError(ArchiveError):
    """A record's name tries to leave the archive, or is not the same in both places that state it."""


class TorchScriptError(ArchiveError):
    """A TorchScript program: its tensors come with code that only TorchScript can run."""


class MalformedPickleError(CheckpointError):
    """The pickle is damaged, or would take far more memory than it has bytes."""


class ForbiddenGlobalError(CheckpointError):
    """The pickle names a function or class that is not part of a state dict; nothing of it was run."""


class StorageError(CheckpointError, LookupError):
    """A storage that a tensor refers to is not in the file, cut short, or of another size than stated."""


class TensorGeometryError(CheckpointError):
    """A tensor's shape, strides and offset reach out of its storage, or are no geometry at all."""


class NameCollisionError(CheckpointError):
    """Two tensors of a nested checkpoint would get the same name."""


class SectionError(CheckpointError, LookupError):
    """The section that was asked for is not in the checkpoint, or holds no named tensors."""


class SafetensorsError(FormatError):
    """A safetensors file or header breaks a rule of the format.

    Attributes:
        rule: The rule, as one of the short names of `SafetensorsRule`, which do not change.
    """

    def __init__(self, rule: SafetensorsRule, message: str) -> None:
        super().__init__(rule, message)
        self.rule = rule

    def __str__(self) -> str:
        return str(self.args[1])


class ShardError(FormatError):
    """The files of a sharded checkpoint do not make a whole."""


class ShardIndexError(ShardError):
    """The index of a sharded checkpoint is not a JSON object with a weight map."""


class MissingShardError(ShardError):
    """A file that a sharded checkpoint needs, or a tensor that should be in it, is not there."""


class SaveError(NVFlareLazyError):
    """A checkpoint was not written. What was there before still is, and nothing else was left behind."""


class UnsavableTensorError(SaveError, TypeError):
    """A value that is not a tensor, or a tensor without dense bytes (sparse, quantized, on the meta device)."""


class PromiseError(SaveError, ValueError):
    """A promised tensor is missing or incomplete, or another tensor, shape, dtype or byte was written."""


class ScratchError(NVFlareLazyError, OSError):
    """The scratch space cannot be used as asked."""


class QuotaExceededError(ScratchError):
    """More bytes than the job may keep on disk."""


class DiskFullError(ScratchError, SaveError):
    """The disk, the user's disk quota or the limit on file sizes is full, or less is free than has to stay free."""


class ScratchGoneError(ScratchError):
    """A scratch directory was deleted underneath the process that leased it."""


class ScratchPermissionError(ScratchError, PermissionError):
    """A scratch directory belongs to somebody else, or others could change what is in it."""


class ReleasedScratchError(ScratchError):
    """The scratch was given back, by an abort for one; what is being written to it is not wanted any more."""


class TransferError(NVFlareLazyError, RuntimeError):
    """Tensors did not get from one process to another."""


class TransferAbortedError(TransferError):
    """The transfer was called off: the job ended, or its abort signal was triggered."""


class PeerLostError(TransferError, ConnectionError):
    """The peer does not answer any more, or no longer has the tensors it offered."""


class SegmentsBlockedError(PeerLostError):
    """The peer offers segments, but requests for them do not reach it; whole tensors are fetched instead."""


class ProtocolError(TransferError, ValueError):
    """What the peer sent breaks the rules of the transfer; nothing of it is used."""


class JobError(NVFlareLazyError, RuntimeError):
    """A federated job cannot go on as it is configured."""


class InitialModelError(JobError):
    """The model a job begins with cannot be opened, made or found."""


class JobCheckpointError(JobError):
    """A job's checkpoint cannot be written, or is not one the job can go on from."""


class UnfitResultError(JobError, ValueError):
    """A client's result has other tensors, shapes or types than the global model."""


class TooFewResultsError(JobError):
    """A round ended with fewer usable results than the job asks for."""
