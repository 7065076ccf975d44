"""The trainer's side of a weight update, and importance weights as tensors; the only part of the client that
imports torch.
"""

from .buckets import Bucket, NamedTensors, Piece, as_frames, buckets, manifest
from .chain import WeightUpdateChain, clone_weights
from .group import WeightUpdateGroup
from .names import checkpoint_tensors
from .shared import SharedBucket, SharedBuckets, SharedTensors
from .steps import Await, Run, Send, Steps, Ticket, call, in_one_session, ipc_steps, tensor_steps
from .token_weights import importance_weights
from .two_phase import update_from_shared

__all__ = [
    "Await",
    "Bucket",
    "NamedTensors",
    "Piece",
    "Run",
    "Send",
    "SharedBucket",
    "SharedBuckets",
    "SharedTensors",
    "Steps",
    "Ticket",
    "WeightUpdateChain",
    "WeightUpdateGroup",
    "as_frames",
    "buckets",
    "call",
    "checkpoint_tensors",
    "clone_weights",
    "importance_weights",
    "in_one_session",
    "ipc_steps",
    "manifest",
    "tensor_steps",
    "update_from_shared",
]
