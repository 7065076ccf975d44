"""The memory that samples hold between their steps, and how much of it they hold together.

Invariants:
- A sample counts from its start with all that it may hold until its end: its latent, the latents that its request keeps, its image, and
  the embeddings of its prompt. So none that has started waits for memory, and a pause may last as long as it likes.
- Embeddings belong to the samples of a request together, and count once.
- Where samples run, another starts only if it fits beside them; if none does, the first that waits starts, whatever it takes.
- What a client has sent is there before its request starts: embeddings that do not fit beside those of other requests are refused.
"""

from collections.abc import Iterable
from itertools import islice

from ...io_struct import CaesuraError, ErrorCode
from ..memory.device_module import DeviceModule, free_and_total
from .request import Embeds, ImageRequest

SENT_SHARE = 0.5
"""Of the limit on the device: most that embeddings of requests take which have sent them, whether they wait or run."""


class Holding:
    """Limits what samples hold together: on the device, and on the host where that is another memory."""

    def __init__(self, device: int | None, host: int | None) -> None:
        """Bytes; None: no limit is known. ``host`` None beside ``device``: the device is the host, and all of it counts there."""
        self.device, self.host = device, host

    def __str__(self) -> str:
        said = [(self.device, "" if self.host is None else " on the device"), (self.host, " on the host")]
        return (
            " and ".join(f"{limit / 2**20:.0f} MiB{where}" for limit, where in said if limit is not None)
            or "anything"
        )

    @classmethod
    def of_free_memory(
        cls, device: DeviceModule, host: DeviceModule, fraction: float, *, kept_free: int, on_host: bool
    ) -> "Holding":
        """``fraction`` of what is free now; on the device, without the ``kept_free`` bytes that components will come to."""
        return cls(_share(device, fraction, kept_free), None if on_host else _share(host, fraction, 0))

    def starting(self, running: list[ImageRequest], waiting: Iterable[ImageRequest], most: int) -> int:
        """How many of those that wait, from the first on and ``most`` at most, may start beside those that run."""
        if self.device is None and self.host is None:
            return sum(1 for _ in islice(waiting, most))
        total = _Total()
        for sample in running:
            total.add(sample)
        count = 0
        for sample in islice(waiting, most):
            total.add(sample)
            if (running or count) and not self._fits(total):
                break
            count += 1
        return count

    def check_sent(self, live: Iterable[ImageRequest], *sent: Embeds | None) -> None:
        """Whether the embeddings that a request has sent may stay here until it ends.

        Args:
            live: the samples of all other requests.

        Raises:
            CaesuraError: ``queue_full``, with the bytes that others have sent and the limit.
        """
        more = sum(each.nbytes for embeds in sent if embeds is not None for each in embeds.values())
        if self.device is None or not more:
            return
        promptings = {id(sample.prompting): sample.prompting for sample in live}
        there = sum(prompting.sent_bytes for prompting in promptings.values())
        limit = int(self.device * SENT_SHARE)
        if there and there + more > limit:
            raise CaesuraError(
                ErrorCode.QUEUE_FULL,
                f"embeddings of other requests take {there} bytes and these {more}, the limit is {limit}",
                waiting=there,
                limit=limit,
            )

    def _fits(self, total: "_Total") -> bool:
        if self.host is None:
            return self.device is None or total.device + total.host <= self.device
        return total.host <= self.host and (self.device is None or total.device <= self.device)


def _share(module: DeviceModule, fraction: float, kept_free: int) -> int | None:
    known = free_and_total(module)
    if known is None or not known[0]:  # a figure that a platform does not give is 0
        return None
    return max(0, int((known[0] - kept_free) * fraction))


class _Total:
    """What some samples hold at most."""

    def __init__(self) -> None:
        self.device = self.host = 0
        self._prompts: set[int] = set()

    def add(self, sample: ImageRequest) -> None:
        if id(sample.prompting) not in self._prompts:
            self._prompts.add(id(sample.prompting))
            self.device += sample.prompting.nbytes
        self.device += sample.latent_bytes
        self.host += sample.kept_bytes
