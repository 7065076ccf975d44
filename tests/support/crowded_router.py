"""A Router in a process with few descriptors: ``python crowded_router.py ENDPOINT LIMIT [held]``.

Echoes message sizes and the CPU seconds that it took; prints its endpoint. ``held``: the thread that counts
connections waits at the first one until a line has come on stdin. Ends with its input.
"""

import resource
import sys
import threading
import time

from caesura.io_struct import AbortReqOutput
from caesura.scheduler.messaging import endpoint
from caesura.scheduler.messaging.router_socket import Router


def main() -> None:
    limit = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    endpoint.HANDSHAKE_MS = 120_000  # a crowd that says nothing stays
    ended, counts = threading.Event(), threading.Event()
    count = endpoint._DescriptorGuard.note_accepted

    def held(guard: endpoint._DescriptorGuard, accepted: int) -> None:
        if accepted:
            counts.wait()
        count(guard, accepted)

    def read() -> None:
        sys.stdin.readline()
        counts.set()
        sys.stdin.read()
        ended.set()

    if sys.argv[3:] == ["held"]:
        endpoint._DescriptorGuard.note_accepted = held  # type: ignore[method-assign]
    router = Router(sys.argv[1], lambda _: None)
    print(router.endpoint, flush=True)
    threading.Thread(target=read, daemon=True).start()
    while not ended.is_set():
        router.socket.poll(20)
        for client, header, _ in router.receive():
            used = time.process_time()
            router.send(client, AbortReqOutput(id=f"{len(header)} {used}", aborted=0))
    router.close()


if __name__ == "__main__":
    main()
