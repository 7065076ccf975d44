"""The steps of an image engine. Nothing else imports this, and with it diffusers."""

import logging
from typing import TYPE_CHECKING

from ...io_struct import CaesuraError, ErrorCode, GenerateImagesReqInput
from ..cache.manager import CacheManager
from ..execution.kernel_report import Serving
from ..images.admission import ImageAdmission
from ..images.components import ComponentStages
from ..images.image_batcher import ImageBatcher
from ..images.image_outputs import ImageOutputs
from ..images.memory_limit import Footprint, MemoryLimit
from ..images.pipeline import load_pipeline, open_component
from ..images.prompt_cache import PromptCache
from ..images.runner import ImageRunner
from ..kernels import TORCH
from ..memory.device_module import device_module_for
from ..memory.host import HOST
from .engine_config import PAGE_SIZE
from .steps import Steps

if TYPE_CHECKING:
    from .engine import Engine

logger = logging.getLogger(__name__)


def image_steps(engine: "Engine") -> Steps:
    config = engine.config
    for field in ("reference_model_path", "deterministic"):
        if getattr(config, field):
            reason = f"{field} is not supported for image pipelines"
            raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field=field)
    loaded = load_pipeline(config, engine.residency, engine.initial_weights.folder)
    logger.info("image pipeline %s: %s", loaded.family.pipeline, ", ".join(loaded.model.components))
    stages = ComponentStages(engine.residency, loaded.movable, engine.stages)
    prompts = PromptCache(config.prompt_cache_bytes)

    def encoders_changed() -> bool:
        return any(name.startswith("text_") for name in loaded.loader.written | engine.delta.written)

    module, on_host = device_module_for(loaded.device), loaded.device.type == "cpu"
    limit = MemoryLimit.of_free_memory(
        module, HOST, config.sizes.kv_fraction, kept_free=engine.residency.still_to_come, on_host=on_host
    )
    logger.info("samples may hold %s together", limit)
    batcher = ImageBatcher(
        engine.waiting,
        max_running=config.sizes.rows,
        limit=limit,
        prompts=prompts,
        encoders_changed=encoders_changed,
        on_idle=stages.leave,
    )
    footprint = Footprint(loaded.family, module, on_host=on_host)
    return Steps(
        loaded=loaded,
        open_folder=lambda path, name: open_component(path, loaded.model.parts[name or ""]),
        runner=ImageRunner(loaded.family, stages, loaded.device, module, footprint),
        request_type=GenerateImagesReqInput,
        admit=ImageAdmission(
            loaded.family,
            loaded.device,
            footprint,
            limit,
            engine.live,
            max_waiting=config.max_waiting_requests,
        ).admit,
        batcher=batcher,
        prompts=prompts,
        outputs=ImageOutputs(engine, batcher),
        # One page, the least there is; nobody takes it.
        cache=CacheManager(2, PAGE_SIZE, False, engine.state.stamp.epoch),
        serving=Serving({"denoise": TORCH}, None),
        latent_bytes_per_pixel=loaded.family.latent_bytes_per_pixel,
    )
