"""The trainer's end of a process group: rank 0 of gloo, met as over ``tcp://``."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from caesura.io_struct.weights import DEFAULT_GROUP_NAME
from caesura.transfer.process_group import Membership, broadcast_options, keys_of, make_backend, serve_store


def trainer_init(init_info: dict[str, Any]) -> Any:
    limit = timedelta(seconds=60)
    address, size = init_info["master_address"], init_info["world_size"]
    store, _ = serve_store(address, init_info["master_port"], size, limit)
    member = Membership(DEFAULT_GROUP_NAME, f"{address}:{store.port}", size, 0, "gloo")
    gloo = make_backend(member, keys_of(member, store)[1], limit, hostname=address)

    def broadcast(tensor: Any, src: int) -> None:
        assert src == 0
        gloo.broadcast([tensor], broadcast_options(limit)).wait()

    return SimpleNamespace(broadcast=broadcast, group=SimpleNamespace(store=store, socket=None))
