"""The memory that samples hold between their steps, and how much of it they hold together.

Invariants:
- A sample counts from its start with all that it may hold until its end: its latent, the latents that its
  request keeps, its image, and the embeddings of its prompt. So none that has started waits for memory.
- Embeddings belong to the samples of a request together, and count once.
- Where samples run, another starts only if it fits beside them; if none does, the first that waits starts.
- Embeddings that a client has sent are there before its request starts: those that do not fit beside those of
  other requests are refused.
"""

from collections.abc import Iterable

from ...io_struct import CaesuraError, ErrorCode
from ..memory.device_module import DeviceModule, free_and_total
from .request import ImageRequest

SENT_SHARE = 0.5
"""Part of the limit on the device for embeddings that requests, waiting or running, have sent."""


class MemoryLimit:
    """Limits what samples hold together: on the device, and on the host where that is another memory."""

    def __init__(self, device: int | None, host: int | None) -> None:
        """``device``: bytes, None without a known limit; ``host``: bytes, None if the device is the host."""
        self.device, self.host = device, host

    def __str__(self) -> str:
        said = [(self.device, "" if self.host is None else " on the device"), (self.host, " on the host")]
        limits = [f"{limit / 2**20:.0f} MiB{where}" for limit, where in said if limit is not None]
        return " and ".join(limits) or "anything"

    @classmethod
    def of_free_memory(
        cls, device: DeviceModule, host: DeviceModule, fraction: float, *, kept_free: int, on_host: bool
    ) -> "MemoryLimit":
        """Return a limit of ``fraction`` of what is free now, without ``kept_free`` bytes for components."""
        return cls(_share(device, fraction, kept_free), None if on_host else _share(host, fraction, 0))

    def allows(self, running: Iterable[ImageRequest], sample: ImageRequest) -> bool:
        others = list(running)
        if not others:
            return True
        samples = [*others, sample]
        prompts = {id(each.conditioning): each.conditioning.nbytes for each in samples}
        device = sum(prompts.values()) + sum(each.latent_bytes for each in samples)
        host = sum(each.kept_bytes for each in samples)
        if self.host is None:
            return self.device is None or device + host <= self.device
        return host <= self.host and (self.device is None or device <= self.device)

    def check_sent(self, live: Iterable[ImageRequest], nbytes: int) -> None:
        """Refuse embeddings of ``nbytes`` that a request has sent, if they may not stay until it ends.

        Raises:
            CaesuraError: ``queue_full``, with the bytes that others have sent and the limit.
        """
        if self.device is None or not nbytes:
            return
        prompts = {id(sample.conditioning): sample.conditioning.sent_bytes for sample in live}
        there, limit = sum(prompts.values()), int(self.device * SENT_SHARE)
        if there and there + nbytes > limit:
            raise CaesuraError(
                ErrorCode.QUEUE_FULL,
                f"embeddings of other requests take {there} bytes and these {nbytes}, the limit is {limit}",
                waiting=there,
                limit=limit,
            )


def _share(module: DeviceModule, fraction: float, kept_free: int) -> int | None:
    known = free_and_total(module)
    if known is None or not known[0]:  # a figure that a platform does not give is 0
        return None
    return max(0, int((known[0] - kept_free) * fraction))
