"""The trainer's side of weight updates and importance weights; the client's only part that imports torch."""

from .buckets import Bucket, NamedTensors, SparseTensor, as_frames, buckets, manifest
from .chain import WeightUpdateChain, clone_weights
from .names import checkpoint_tensors
from .shared import SharedBucket, SharedBuckets, SharedTensors
from .sparse_updates import DeltaTracker, WeightDelta
from .token_weights import importance_weights
from .two_phase import update_from_shared, update_sparse
from .update_group import WeightUpdateGroup
from .verl_flushes import read_flush

__all__ = [
    "Bucket",
    "DeltaTracker",
    "NamedTensors",
    "SharedBucket",
    "SharedBuckets",
    "SharedTensors",
    "SparseTensor",
    "WeightDelta",
    "WeightUpdateChain",
    "WeightUpdateGroup",
    "as_frames",
    "buckets",
    "checkpoint_tensors",
    "clone_weights",
    "importance_weights",
    "manifest",
    "read_flush",
    "update_from_shared",
    "update_sparse",
]
