"""Caesura's backend for trainers that send weights by vLLM's API (``WeightTransferTrainerFactory``).

    register()  # or the entry point, where vLLM loads its plugins
    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(rank=0, transport="shared_memory"),
        client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model),
    )
    engine.send_weights()

Invariants:
- vLLM is imported by :func:`register` alone. ``client`` and ``source`` have the methods of its protocols
  ``VLLMWeightSyncClient`` and ``WeightSource``; the first rank sends, the others only iterate.
- At most one bucket of weights is held beside the source. An update that fails is never finished.
"""

from __future__ import annotations

import shutil
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import msgspec

from ..client.exceptions import GroupError
from ..client.trainer.buckets import AnyTensor, Bucket, SparseTensor, buckets
from ..client.trainer.rendezvous import GRACE_S, await_ranks, beside, make_store
from ..client.trainer.shared import SharedBucket, common_cuda_device
from ..client.trainer.update_group import WeightUpdateGroup, whole
from ..io_struct.weights import DEFAULT_BUCKET_BYTES, DEFAULT_GROUP_NAME
from ..transfer.process_group import Membership, keys_of, make_backend

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from ..client.trainer import WeightDelta

BACKEND = "caesura"


def register() -> None:
    """Add the backend ``caesura`` to vLLM's trainer engines; again: no change."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    with suppress(ValueError):  # it is registered
        WeightTransferTrainerFactory.register_engine(BACKEND, __name__, TrainerEngine.__name__)


@dataclass
class TrainerInitInfo:
    """How a trainer's weights reach its ``caesura serve``."""

    backend: ClassVar[str] = BACKEND

    transport: Literal["gloo", "shared_memory", "disk"] = "shared_memory"
    """``gloo``: over the network. ``shared_memory``: of this host, or of the CUDA device that the trainer and
    the engine share. ``disk``: in a folder that both read."""
    _: KW_ONLY
    rank: int
    """Rank of this process in the trainer; 0 sends."""
    world_size: int = 2
    """``gloo``: 1 + the number that ``/get_world_size`` answers."""
    master_address: str = "127.0.0.1"
    """``gloo``: address of this process for the engines."""
    master_port: int = 0
    """``gloo``: port of the rendezvous; 0 means any free port."""
    timeout_s: float = 60.0
    """``gloo``: maximum seconds for joining."""
    folder: str | None = None
    """``disk``: folder under the server's ``--weights-root``."""
    config: str | None = None
    """``disk``: the model's ``config.json``."""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """Bytes of one message; a larger tensor is sent alone."""

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class TrainerEngine:
    """vLLM's ``TrainerWeightTransferEngine`` for a Caesura server; see :class:`TrainerInitInfo`."""

    init_info_cls = TrainerInitInfo

    def __init__(self, init_info: TrainerInitInfo, client: Any, source: Iterable[tuple[str, Tensor]]) -> None:
        self._info = init_info
        self._client = client
        self._source = source
        self._group: WeightUpdateGroup | None = None
        self._memory: SharedBucket | None = None

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInitInfo, *, client: Any, source: Iterable[tuple[str, Tensor]] | None = None
    ) -> Self:
        """Join the engines' group, or announce the transport. Raises the client's error, or GroupError."""
        if source is None:
            raise ValueError("the backend caesura needs a source of (name, tensor) pairs")
        if init_info.transport == "disk" and (init_info.folder is None or init_info.config is None):
            raise ValueError("the transport disk needs folder and config")
        engine = cls(init_info, client, source)
        if init_info.is_sender:
            engine._open()
        return engine

    def send_weights(self, weight_version: str | None = None) -> None:
        """Send every pair of the source in one update, which serves when this returns; on every rank."""
        if not self._info.is_sender:
            for _ in self._source:  # drives the collectives of the trainer's own ranks
                pass
            return
        self._client.start_weight_update()
        if self._info.transport == "disk":
            self._save()
        elif self._group is None:
            for bucket in buckets(self._source, self._info.bucket_bytes):
                self._share(bucket)
        else:
            for part in whole(self._source, self._info.bucket_bytes, lambda named: named[1].nbytes):
                self._broadcast(part)
        version = () if weight_version is None else (weight_version,)
        self._client.finish_weight_update(*version)

    def send_delta(self, delta: WeightDelta, weight_version: str | None = None) -> None:
        """Send what changed as one update, on the first rank; the engine refuses a delta of other weights."""
        if not self._info.is_sender or not delta:
            return
        self._client.start_weight_update()
        base = msgspec.to_builtins(delta.base())
        if self._info.transport == "disk":
            with TemporaryDirectory(prefix="delta-", dir=self._info.folder) as folder:
                delta.save(folder)
                self._client.update_weights({"path": folder})
        elif self._group is None:
            for bucket in buckets(delta, self._info.bucket_bytes):
                self._share(bucket, base=base)
        else:
            for part in whole(delta.items(), self._info.bucket_bytes, lambda named: named[1].nbytes):
                self._broadcast(part, base=base)
        self._client.finish_weight_update(*(() if weight_version is None else (weight_version,)))

    def shutdown(self) -> None:
        """Leave the group. Idempotent."""
        if self._group is not None:
            self._group.close()
        if self._memory is not None:
            self._memory.close()
        self._group = self._memory = None

    def _open(self) -> None:
        info = self._info
        if info.transport != "gloo":
            self._client.init_weight_transfer_engine({"backend": info.transport})
            return
        limit = timedelta(seconds=info.timeout_s)
        store, is_local = make_store(info.master_address, info.master_port, limit, info.world_size)
        address = f"{info.master_address}:{store.port}"
        member = Membership(DEFAULT_GROUP_NAME, address, info.world_size, 0, "gloo")
        invited = {
            "backend": "gloo",
            "master_address": info.master_address,
            "master_port": store.port,
            "world_size": info.world_size,
            "packed": True,
            "packed_buffer_size_bytes": 2**62,  # a message is one broadcast
        }
        listen = info.master_address if is_local else None
        join = partial(make_backend, member, keys_of(member, store)[1], limit, hostname=listen)
        joining = beside(join)
        await_ranks(
            [beside(partial(self._client.init_weight_transfer_engine, invited)), joining], info.timeout_s
        )
        self._group = WeightUpdateGroup(joining.result())
        self._group.store = store

    def _broadcast(self, part: Sequence[tuple[str, AnyTensor]], **more: Any) -> None:
        assert self._group is not None
        part = [(name, tensor.detach()) for name, tensor in part]
        if more:
            more["num_updates_list"] = [
                tensor.count if isinstance(tensor, SparseTensor) else None for _, tensor in part
            ]
        described = {
            **more,
            "names": [name for name, _ in part],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
            "shapes": [list(tensor.shape) for _, tensor in part],
        }
        call = beside(partial(self._client.update_weights, described))
        try:
            self._group.send(part, "flattened_bucket", call.done)
        except GroupError as error:
            wait([call], GRACE_S)  # the engine's refusal says more than the connection that it has closed
            if call.done() and (refusal := call.exception()) is not None:
                raise refusal from error
            raise
        call.result()

    def _share(self, bucket: Bucket, **more: Any) -> None:
        if self._memory is None or self._memory.nbytes < bucket.nbytes:
            if self._memory is not None:
                self._memory.close()
            device = common_cuda_device(piece.rows for piece in bucket.pieces)
            self._memory = SharedBucket(bucket.nbytes, device)
        specs = self._memory.fill(bucket)
        shared = {"handle": self._memory.handle, "specs": specs}
        self._client.update_weights({**more, **msgspec.to_builtins(shared)})

    def _save(self) -> None:
        from safetensors.torch import save_file

        assert self._info.folder is not None
        assert self._info.config is not None
        with TemporaryDirectory(prefix="weights-", dir=self._info.folder) as folder:
            shutil.copyfile(self._info.config, Path(folder) / "config.json")
            tensors = {name: tensor.detach().contiguous() for name, tensor in self._source}
            save_file(tensors, Path(folder) / "model.safetensors")
            self._client.update_weights({"path": folder})
