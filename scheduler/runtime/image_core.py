"""The core of an image engine: a diffusion pipeline behind the same socket, commands and loop.

Invariant: only an engine whose model is a pipeline imports this, and with it diffusers.
"""

import logging
from typing import TYPE_CHECKING

from ...io_struct import CaesuraError, ErrorCode, GenerateImagesReqInput
from ..cache.manager import CacheManager
from ..execution.kernel_report import Serving
from ..images.admission import ImageAdmission
from ..images.batcher import ImageBatcher, ImageQueue
from ..images.footprint import Footprint
from ..images.holding import Holding
from ..images.outbox import ImageOutbox
from ..images.outputs import ImageOutputs
from ..images.pipeline import load_pipeline, open_component
from ..images.prompts import EncodedPrompts
from ..images.recovery import ImageRecovery
from ..images.runner import ImageRunner
from ..images.stages import Stages
from ..kernels import TORCH
from ..memory.device_module import DeviceModule, device_module_for
from ..memory.host import HOST
from ..scheduling.live_requests import LiveRequests
from .config import PAGE_SIZE
from .core import Core

if TYPE_CHECKING:
    from ..images.request import ImageRequest
    from .engine import Engine

logger = logging.getLogger(__name__)


def image_core(engine: "Engine") -> Core:
    """The core of the pipeline in ``config.model_path``.

    Raises:
        CaesuraError: the folder cannot be served; ``unsupported``, an option that only language models have.
    """
    config = engine.config
    for field, value in (
        ("reference_model_path", config.reference_model_path),
        ("deterministic", config.deterministic or None),
    ):
        if value is not None:
            raise CaesuraError(
                ErrorCode.UNSUPPORTED, f"{field} is not supported for image pipelines", field=field
            )
    loaded = load_pipeline(config, engine.residency, engine.initial_weights.folder)
    logger.info("image pipeline %s: %s", loaded.family.pipeline, ", ".join(loaded.model.components))
    stages = Stages(engine.residency, loaded.movable, engine.stages)
    prompts = EncodedPrompts(config.prompt_cache_bytes)
    waiting = ImageQueue()
    module, on_host = device_module_for(loaded.device), loaded.device.type == "cpu"
    holding = _holding(engine, module, on_host=on_host)
    batcher = ImageBatcher(
        waiting,
        max_running=config.sizes.rows,
        holding=holding,
        prompts=prompts,
        encoders_changed=lambda: any(name.startswith("text_") for name in loaded.loader.written),
        on_idle=stages.leave,
    )
    live: LiveRequests[ImageRequest] = LiveRequests()
    outbox = ImageOutbox(engine.router.send)
    footprint = Footprint(loaded.family, module, on_host=on_host)
    outputs = ImageOutputs(
        batcher, live, outbox, on_finished=engine.replies.finished, stamp=engine.state.stamp
    )
    return Core(
        loaded=loaded,
        open_folder=lambda path, name: open_component(path, loaded.model.parts[name or ""]),
        runner=ImageRunner(loaded.family, stages, loaded.device, module, footprint),
        request_type=GenerateImagesReqInput,
        admission=ImageAdmission(
            loaded.family,
            loaded.device,
            footprint,
            holding,
            live,
            max_waiting=config.max_waiting_requests,
        ),
        live=live,
        waiting=waiting,
        batcher=batcher,
        prompts=prompts,
        outputs=outputs,
        outbox=outbox,
        recovery=ImageRecovery(batcher, outputs, engine.device_cache),
        cache=CacheManager(
            2, PAGE_SIZE, False, engine.state.stamp.epoch
        ),  # one page, the least there is; nobody takes it
        serving=Serving({"denoise": TORCH}, None),
        latent_bytes_per_pixel=loaded.family.latent_bytes_per_pixel,
    )


def _holding(engine: "Engine", module: DeviceModule, *, on_host: bool) -> Holding:
    """Of the memory that is free now."""
    holding = Holding.of_free_memory(
        module,
        HOST,
        engine.config.sizes.kv_fraction,
        kept_free=engine.residency.still_to_come,
        on_host=on_host,
    )
    logger.info("samples may hold %s together", holding)
    return holding
