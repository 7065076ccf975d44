"""A Router in a process with few descriptors: ``python crowded_router.py ENDPOINT LIMIT``.

Echoes message sizes; prints its endpoint, then on the end of its input the CPU seconds that it took.
"""

import resource
import sys
import threading
import time

from caesura.io_struct import AbortReqOutput
from caesura.scheduler.serving import client_access
from caesura.scheduler.serving.router_socket import Router


def main() -> None:
    limit = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    client_access.HANDSHAKE_MS = 120_000  # a crowd that says nothing stays
    router = Router(sys.argv[1], lambda _: None)
    print(router.endpoint, flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: sys.stdin.read() or ended.set(), daemon=True).start()
    while not ended.is_set():
        router.socket.poll(20)
        for client, header, _ in router.receive():
            used = time.process_time()
            router.send(client, AbortReqOutput(id=f"{len(header)} {used}", aborted=0))
    router.close()


if __name__ == "__main__":
    main()
