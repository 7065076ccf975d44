"""The memory that a step takes beside the weights: whether it can fit, asked before it begins.

On a host, memory that is not there is refused by nobody: the system ends the process that touches it. An accelerator's allocator
says so itself.

Invariants:
- Bounds are lower ones, of the largest tensors that live at the same time: what could fit is not refused.
- A request whose sample could not run alone on this machine, were it empty, is refused when it arrives. A step that does not fit
  now raises MemoryError before it is begun, and recovery makes it again with fewer samples.
"""

from math import prod

from ...io_struct import CaesuraError, ErrorCode, GenerateImagesReqInput
from ..memory.device_module import DeviceModule, free_and_total
from .batcher import ImageBatch, Kind
from .family import Family

WORTH_ASKING = 64 << 20
"""Bytes of a step from which the free memory is looked up, which takes tenths of a millisecond."""
_FEED_FORWARD = 9
"""Tensors as wide as the transformer while a block is in its activation: what goes in and out of that, four each, and the residual."""
_RESIDUAL = 3
"""Tensors of full size in the VAE's last block: its input, its normalised input, and that behind the activation."""


class Footprint:
    """Compares what steps need at least with the memory of the device."""

    def __init__(self, family: Family, device_module: DeviceModule, *, on_host: bool) -> None:
        """``on_host``: the device is the host; else nothing is refused here."""
        self._family = family
        self._module = device_module
        self._on_host = on_host

    def least(self, kind: Kind, rows: int, size: tuple[int, int]) -> int:
        """Bytes of a step of ``rows`` samples of ``size`` (height and width in pixels), at least. Encoding: 0, since prompts are short."""
        family = self._family
        if kind == "denoise":
            config = family.transformer.config
            width: int = config.num_attention_heads * config.attention_head_dim
            tokens = family.image_tokens(family.latent_shape(*size))
            return rows * tokens * width * _FEED_FORWARD * family.dtype.itemsize
        if kind == "decode":
            itemsize: int = next(family.vae.parameters()).dtype.itemsize
            return rows * prod(size) * family.vae_channels * _RESIDUAL * itemsize
        return 0

    def check_request(self, message: GenerateImagesReqInput, *, guided: bool) -> None:
        """Whether a sample of ``message`` could ever run.

        Raises:
            CaesuraError: ``out_of_memory``, with what it needs and what there is.
        """
        if not self._on_host:
            return
        size = message.height, message.width
        least = max(self.least("denoise", 1 + guided, size), self.least("decode", 1, size))
        if least < WORTH_ASKING or (known := free_and_total(self._module)) is None or least <= known[1]:
            return
        raise CaesuraError(
            ErrorCode.OUT_OF_MEMORY,
            f"an image of {message.width} x {message.height} pixels takes at least {least} bytes beside the weights, "
            f"and this machine has {known[1]}",
            needed=least,
            total=known[1],
        )

    def check_step(self, batch: ImageBatch) -> None:
        """Whether a step can fit now.

        Raises:
            MemoryError: it cannot.
        """
        if not self._on_host or batch.kind == "encode":
            return
        first, rows = batch.samples[0], len(batch.samples)
        if batch.kind == "denoise" and first.prompting.guided:
            rows *= 2
        least = self.least(batch.kind, rows, first.size)
        if least < WORTH_ASKING or (known := free_and_total(self._module)) is None or least <= known[0]:
            return
        raise MemoryError(
            f"a step of {len(batch.samples)} images of {first.message.width} x {first.message.height} pixels takes at least "
            f"{least} bytes, and {known[0]} are free"
        )
