"""Sections in this process: captured steps against eager ones, the profiler."""

from typing import Any

import torch
from gpu.run import Run
from harness.in_process import EngineDriver, driver, tokens_of

from caesura.client.connection.results import read_floats
from caesura.io_struct import (
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
)

NEW_TOKENS = 12
PROFILED_STEPS = 20
MAX_TICKS = 1_000_000
_WAITS = ("Synchronize", "cudaMemcpy ")
"""Parts of the names of calls for which the host waits."""

Output = tuple[list[int], list[float]]


def graphs(run: Run) -> dict[str, Any]:
    """Compare tokens and logprobs of captured and eager steps, with other allocations between the steps.

    The small model and Triton: neither a compiler of CUDA nor much memory is needed.
    """
    eager = _outputs(run, cuda_graphs=False)
    captured = _outputs(run, cuda_graphs=True)
    found: dict[str, Any] = {"is_captured": captured["is_captured"], "graphs_bytes": captured["graphs_bytes"]}
    for batch in run.plan.compared:
        found[str(batch)] = _compared(eager[str(batch)], captured[str(batch)])
    return found


def profile(run: Run) -> dict[str, Any]:
    """Profile twenty steps of 64 rows: kernels and waits a step, busy time of the device, longest kernels."""
    plan, rows = run.plan, min(64, run.plan.rows)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.on_card:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with _engine(run, cuda_graphs=True) as engine:
        for prompt in run.prompts(rows, plan.prompt_tokens // 4, 9):
            engine.generate(prompt, max_new_tokens=4 * PROFILED_STEPS)
        engine.tick(PROFILED_STEPS)  # past the prompts
        first = engine.status().step
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(PROFILED_STEPS):
                engine._turn()
            if run.on_card:
                torch.cuda.synchronize()
        steps = max(1, engine.status().step - first)
        engine.run_until_idle()
    return _summary(list(profiler.events()), steps)


def residency(run: Run) -> dict[str, Any]:
    """Pause, release and resume; compare the weights' places and the tokens, and count freed bytes."""
    with _engine(run, folder=run.small(), cuda_graphs=True) as engine:
        before, places, held = _generate(run, engine, 3), _addresses(engine), _free(run)
        engine.call(PauseGenerationReqInput(mode="abort"))
        engine.call(ReleaseMemoryOccupationReqInput(), max_ticks=MAX_TICKS)
        run.free()
        released = _free(run)
        engine.call(ResumeMemoryOccupationReqInput(), max_ticks=MAX_TICKS)
        update = UpdateWeightFromDiskReqInput(model_path=str(run.small()), flush_cache=False)
        committed = engine.call(update, max_ticks=MAX_TICKS).committed
        engine.call(ContinueGenerationReqInput(), max_ticks=MAX_TICKS)
        after = _generate(run, engine, 3)
        return {
            "addresses_kept": _addresses(engine) == places, "committed": committed,
            "outputs_kept": before == after,
            "free_before": held, "free_released": released, "free_after": _free(run),
        }  # fmt: skip


def _engine(run: Run, *, folder: Any = None, **options: Any) -> EngineDriver:
    plan = run.plan
    length = plan.prompt_tokens + 8 * PROFILED_STEPS
    return driver(
        folder or run.large(),
        "cuda" if run.on_card else "cpu",
        context_len=length,
        kv_pool_tokens=plan.rows * length,
        max_running_requests=plan.rows,
        chunked_prefill_size=plan.chunk_tokens,
        prefix_cache=False,
        **{"attention_backend": run.attention, **options},
    )


def _outputs(run: Run, **options: Any) -> dict[str, Any]:
    with _engine(
        run, folder=run.small(), attention_backend="triton" if run.on_card else "auto", **options
    ) as engine:
        held = getattr(engine.engine.runner, "graphs", None)
        found: dict[str, Any] = {str(batch): _generate(run, engine, batch) for batch in run.plan.compared}
        found["is_captured"] = held is not None and held.are_captured
        found["graphs_bytes"] = 0 if held is None else held.nbytes
    run.free()
    return found


def _generate(run: Run, engine: EngineDriver, batch: int) -> list[Output]:
    """Generate greedily; between steps take memory, fill it with NaN and free it, as a learner would."""
    engine.call(FlushCacheReqInput(), max_ticks=MAX_TICKS)
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    ids = []
    for prompt in run.prompts(batch, 17, batch, run.plan.small):
        message = GenerateReqInput(input_ids=prompt, sampling_params=params, return_logprob=True)
        ids.append(engine.send(message))
        engine.engine.scheduler.receive(0)
    for tick in range(2 * NEW_TOKENS):
        engine.tick()
        for size in (1 << 20, 3000, 1 << 24):
            torch.full((size,), torch.nan, device=run.device)
        if run.on_card and tick % 5 == 0:
            torch.cuda.empty_cache()
    engine.run_until_idle()
    results = [engine.result(message_id) for message_id in ids]
    return [(tokens_of(result), read_floats(result.output_logprobs)) for result in results]


def _compared(eager: list[Output], captured: list[Output]) -> dict[str, Any]:
    agreed, furthest = 0, 0.0
    for (ids, logprobs), (other_ids, other_logprobs) in zip(eager, captured, strict=True):
        same = [mine == theirs for mine, theirs in zip(ids, other_ids, strict=True)]
        count = same.index(False) if False in same else len(same)
        agreed += count
        pairs = zip(logprobs[:count], other_logprobs[:count], strict=True)
        furthest = max([furthest, *(abs(mine - theirs) for mine, theirs in pairs)])
    return {
        "equal": eager == captured, "tokens": NEW_TOKENS * len(eager), "agreed": agreed,
        "logprob_difference": furthest,
    }  # fmt: skip


def _addresses(engine: EngineDriver) -> list[int]:
    return [tensor.data_ptr() for _, tensor in engine.engine.runner.model.named_storage()]


def _free(run: Run) -> int:
    return int(torch.cuda.mem_get_info()[0]) if run.on_card else 0


def _summary(events: list[Any], steps: int) -> dict[str, Any]:
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    waits = [event for event in events if any(name in event.name for name in _WAITS)]
    spans = sorted((event.time_range.start, event.time_range.end) for event in on_device)
    busy, end = 0.0, float("-inf")
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - spans[0][0] if spans else 0.0
    longest: dict[str, float] = {}
    for event in on_device:
        longest[event.name] = longest.get(event.name, 0.0) + event.time_range.elapsed_us()
    most = sorted(longest.items(), key=lambda item: -item[1])[:15]
    return {
        "steps": steps, "kernels_per_step": len(on_device) / steps, "waits_per_step": len(waits) / steps,
        "idle_share": 1 - busy / whole if whole else None,
        "longest_us_per_step": {name[:120]: time / steps for name, time in most},
    }  # fmt: skip
