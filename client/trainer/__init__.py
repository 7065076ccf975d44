"""The trainer's side of weight updates and importance weights; the client's only part that imports torch."""

from .buckets import Bucket, NamedTensors, as_frames, buckets, manifest
from .chain import WeightUpdateChain, clone_weights
from .names import checkpoint_tensors
from .shared import SharedBucket, SharedBuckets, SharedTensors
from .token_weights import importance_weights
from .two_phase import update_from_shared
from .update_group import WeightUpdateGroup

__all__ = [
    "Bucket",
    "NamedTensors",
    "SharedBucket",
    "SharedBuckets",
    "SharedTensors",
    "WeightUpdateChain",
    "WeightUpdateGroup",
    "as_frames",
    "buckets",
    "checkpoint_tensors",
    "clone_weights",
    "importance_weights",
    "manifest",
    "update_from_shared",
]
