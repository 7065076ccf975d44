"""Builds the status reply: a snapshot between two steps, without side effects."""

import os
from time import monotonic
from typing import TYPE_CHECKING

from ... import __version__
from ...io_struct import DeviceMemory, EngineTotals, GetStatusReqOutput, KVUsage, StageStatus
from ..memory.device_memory import DeviceMemoryReading, get_available_memory
from ..runtime.engine_config import PAGE_SIZE

if TYPE_CHECKING:
    from ..runtime.engine import Engine


def status(engine: "Engine", message_id: str) -> GetStatusReqOutput:
    state, steps, now, last = engine.state, engine.steps, monotonic(), engine.scheduler.last_step_at
    return GetStatusReqOutput(
        id=message_id,
        incarnation=state.stamp.incarnation,
        generation=state.generation,
        pause_mode=state.pause_mode,
        pause_age_s=state.pause_age_s,
        pause_owner=state.ownership.owner,
        lease_left_s=None if (left := state.lease_left_s) is None else max(0.0, left),
        weights=state.weights,
        weights_detail=state.weights_detail,
        memory="released" if state.released else "resident",
        released_tags=sorted(state.released),
        weight_version=state.stamp.version,
        weights_epoch=state.stamp.epoch,
        digest=state.stamp.digest,
        session=engine.sessions.status(),
        update=engine.updates.progress(),
        running_requests=engine.batcher.num_running,
        prefilling_requests=engine.batcher.num_prefilling,
        waiting_requests=len(engine.waiting),
        step=state.step,
        last_step_age_s=None if last is None else now - last,
        generated_tokens=engine.outputs.generated_tokens,
        gen_throughput=engine.throughput.generated_per_s(),
        images=engine.batcher.images,
        latent_bytes_per_pixel=steps.latent_bytes_per_pixel,
        num_retractions=engine.batcher.num_retractions,
        step_failures=engine.recovery.counts(),
        kv=KVUsage(
            **{name: pages * PAGE_SIZE for name, pages in engine.cache.usage()._asdict().items()},
            page_size=PAGE_SIZE,
            bytes_per_token=steps.kv_bytes_per_token,
            routing_bytes_per_token=steps.routing_bytes_per_token,
        ),
        kv_tier=None if engine.cache.tier is None else engine.cache.tier.status(PAGE_SIZE),
        device_memory=_memory(engine),
        ranks=engine.executor.status(),
        memory_by_tag=engine.history.by_tag,
        totals=EngineTotals(
            prompt_tokens=engine.batcher.prompt_tokens,
            cached_tokens=engine.batcher.cached_tokens,
            drafts=engine.batcher.drafts,
            drafted_tokens=engine.batcher.drafted_tokens,
            accepted_tokens=engine.batcher.accepted_tokens,
            finished_requests=dict(engine.outputs.finished),
            pauses=state.pause_totals(),
            updates=state.update_totals(),
            emptied=engine.device_cache.totals(),
            **engine.replies.samples.totals(),
        ),
        stages=[
            StageStatus(name=name, count=t.count, total_s=t.seconds, median_s=t.median, longest_s=t.longest)
            for name, t in engine.stages.totals().items()
        ],
        prompt_cache=None if engine.prompts is None else engine.prompts.status(),
        components=engine.residency.status(),
        reference=None if engine.scoring is None else engine.scoring.status(),
        drift=engine.drift.status(),
        grammars=None if engine.grammars is None else engine.grammars.status(),
        model_path=engine.updates.model_path,
        dtype=str(engine.loaded.dtype).removeprefix("torch."),
        device=engine.config.device,
        weights_cpu_backup=engine.config.weights_cpu_backup,
        max_loras=0 if engine.adapters.slots is None else engine.adapters.slots.count - 1,
        max_loaded_loras=engine.adapters.most,
        max_lora_rank=0 if engine.adapters.slots is None else engine.adapters.slots.max_rank,
        adapters=engine.adapters.status(),
        kernels=steps.serving.by,
        kernels_reason=steps.serving.reason,
        context_len=steps.context_len,
        vocab_size=steps.vocab_size,
        max_running_requests=engine.config.sizes.rows,
        uptime_s=now - engine.started_at,
        pid=os.getpid(),
        version=__version__,
    )


def _memory(engine: "Engine") -> DeviceMemory:
    reading = DeviceMemoryReading.of(engine.device_module)
    each = [get_available_memory(engine.config.device)]
    each += [rank.available for rank in engine.executor.status()]
    known = [size for size in each if size is not None]
    return DeviceMemory(
        reserved=reading.reserved,
        allocated=reading.allocated,
        available=min(known) if len(known) == len(each) else None,  # unknown if that of any rank is
        weights=engine.weights_bytes,
        kv_cache=engine.residency.nbytes("kv_cache"),
        weights_backup=engine.residency.backup_bytes("weights"),
        components=engine.residency.moved_in_bytes,
        components_peak=engine.residency.peak_bytes,
    )
