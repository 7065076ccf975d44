"""The memory of images: what a step takes beside the weights, and what samples hold between their steps.

On a host, memory that is not there is refused by nobody: the system ends the process that touches it. An
accelerator's allocator says so itself.

Invariants:
- Bounds of steps are lower ones, of the largest tensors that live at the same time. A request whose sample
  could not run alone on this machine is refused when it arrives; a step that does not fit now raises
  MemoryError before it is begun, and recovery makes it again with fewer samples.
- A sample counts from its start with all that it may hold until its end: its latent, the latents that its
  request keeps, its image, and the embeddings of its prompt. So none that has started waits for memory.
- Embeddings belong to the samples of a request together, and count once.
- Where samples run, another starts only if it fits beside them; if none does, the first that waits starts.
- Embeddings that a client has sent are there before its request starts: those that do not fit beside those of
  other requests are refused.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from ...io_struct import CaesuraError, ErrorCode, GenerateImagesReqInput
from ..memory.device_module import DeviceModule, free_and_total
from .image_request import Conditioning, ImageBatch, ImageRequest, Kind
from .pipeline_family import Family

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
        """Refuse (``queue_full``) embeddings that were sent if they may not stay until their request ends."""
        if self.device is None or not nbytes:
            return
        prompts = {id(sample.conditioning): sample.conditioning.sent_bytes for sample in live}
        there, limit = sum(prompts.values()), int(self.device * SENT_SHARE)
        if there and there + nbytes > limit:
            reason = (
                f"embeddings of other requests take {there} bytes and these {nbytes}, the limit is {limit}"
            )
            raise CaesuraError(ErrorCode.QUEUE_FULL, reason, waiting=there, limit=limit)


def _share(module: DeviceModule, fraction: float, kept_free: int) -> int | None:
    known = free_and_total(module)
    if known is None or not known[0]:  # a figure that a platform does not give is 0
        return None
    return max(0, int((known[0] - kept_free) * fraction))


WORTH_ASKING = 64 << 20
"""Bytes of a step from which the free memory is looked up, which takes tenths of a millisecond."""
_FEED_FORWARD = 9
"""Tensors as wide as the transformer in a block's activation: four in, four out, and the residual."""
_RESIDUAL = 3
"""Tensors of full size in the VAE's last block: its input, normalised, and behind the activation."""
_WIDENED = 2
"""Tensors as wide as a text encoder's feed-forward: the activation's input and output."""
_BIASES = 2
"""Copies of the bias of T5's attention for each two tokens and each head: as computed, and as taken."""


class Footprint:
    def __init__(self, family: Family, device_module: DeviceModule, *, on_host: bool) -> None:
        """``on_host``: the device is the host; else nothing is refused here."""
        self._family = family
        self._module = device_module
        self._on_host = on_host

    def least(self, kind: Kind, rows: int, size: tuple[int, int]) -> int:
        """Return the least bytes of a denoising or decoding step of ``rows`` samples of ``size`` pixels."""
        family = self._family
        if kind == "denoise":
            config = family.transformer.config
            width: int = config.num_attention_heads * config.attention_head_dim
            tokens = family.image_tokens(family.latent_shape(*size))
            return rows * tokens * width * _FEED_FORWARD * family.dtype.itemsize
        assert kind == "decode", "encoding depends on prompts"
        itemsize: int = next(family.vae.parameters()).dtype.itemsize
        return rows * prod(size) * family.vae_channels * _RESIDUAL * itemsize

    def least_encoding(self, rows: int, lengths: Sequence[int]) -> int:
        """Return the least bytes of encoding ``rows`` prompts, of ``lengths`` tokens by text encoder."""
        encoders = zip(self._family.encoders, lengths, strict=True)
        return max(_least_of_encoder(encoder, rows, length) for encoder, length in encoders)

    def check_request(self, message: GenerateImagesReqInput, *, guided: bool) -> None:
        """Raise ``out_of_memory`` if a sample of ``message`` could never run."""
        size = message.height, message.width
        least = max(self.least("denoise", 1 + guided, size), self.least("decode", 1, size))
        self._require_total(least, f"an image of {message.width} x {message.height} pixels")

    def check_prompt(self, conditioning: Conditioning) -> None:
        """Raise ``out_of_memory`` if a request's prompt, with that of guidance, could never be encoded."""
        if unencoded := conditioning.unencoded:
            lengths = [*map(len, unencoded[0])]
            least = self.least_encoding(len(unencoded), lengths)
            self._require_total(least, f"encoding {_prompts(len(unencoded), lengths)}")

    def check_step(self, batch: ImageBatch) -> None:
        """Raise MemoryError if a step cannot fit now."""
        if not self._on_host:
            return
        if batch.kind == "encode":
            unencoded = [ids for conditioning in batch.prompts for ids in conditioning.unencoded]
            lengths = [*map(len, unencoded[0])]
            least = self.least_encoding(len(unencoded), lengths)
            what = f"encoding {_prompts(len(unencoded), lengths)}"
        else:
            first, rows = batch.samples[0], len(batch.samples)
            doubled = batch.kind == "denoise" and first.conditioning.guided
            least = self.least(batch.kind, rows * 2 if doubled else rows, first.size)
            what = f"a step of {rows} images of {first.message.width} x {first.message.height} pixels"
        if least < WORTH_ASKING or (known := free_and_total(self._module)) is None or least <= known[0]:
            return
        raise MemoryError(f"{what} takes at least {least} bytes, and {known[0]} are free")

    def _require_total(self, least: int, what: str) -> None:
        if not self._on_host or least < WORTH_ASKING:
            return
        known = free_and_total(self._module)
        if known is not None and least > known[1]:
            reason = (
                f"{what} takes at least {least} bytes beside the weights, and this machine has {known[1]}"
            )
            raise CaesuraError(ErrorCode.OUT_OF_MEMORY, reason, needed=least, total=known[1])


def _least_of_encoder(encoder: Any, rows: int, length: int) -> int:
    config = encoder.config.get_text_config()
    itemsize: int = next(encoder.parameters()).dtype.itemsize
    widest: int = config.d_ff if hasattr(config, "d_ff") else config.intermediate_size
    biases = 0
    if hasattr(config, "relative_attention_num_buckets"):
        biases = _BIASES * config.num_heads * length * length
    return itemsize * max(rows * length * widest * _WIDENED, biases)


def _prompts(rows: int, lengths: Sequence[int]) -> str:
    return f"{rows} prompts of {' and '.join(map(str, lengths))} tokens"
