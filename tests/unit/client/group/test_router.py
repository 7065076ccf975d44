"""Choice of the engine for a request by load, cached prefixes and routing keys, without engines."""

from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_scheduler import status_reply

from caesura.client import InternalError
from caesura.client.group.combining import Counters, combined, combined_status
from caesura.client.group.router import (
    LOAD_MARGIN,
    MAX_PREFIXES,
    PREFIX_BLOCK,
    Router,
    current_routing_key,
    routed_by,
)
from caesura.io_struct import (
    CheckDriftReqOutput,
    ContinueGenerationReqOutput,
    Distribution,
    DriftPart,
    DriftReport,
    DriftUpdate,
    EngineTotals,
    FlushCacheReqOutput,
    GetStatusReqInput,
    GetStatusReqOutput,
    PauseGenerationReqOutput,
    RankMemory,
    ReleaseMemoryOccupationReqOutput,
    RenewPauseLeaseReqOutput,
    StartProfileReqOutput,
    StopProfileReqOutput,
    WeightsCheckerReqOutput,
)


@dataclass(eq=False)
class Engine:
    name: str
    load: int = 0


def prompt(first: int, length: int = 4 * PREFIX_BLOCK) -> list[int]:
    return [first + position for position in range(length)]


def routed(*engines: Engine) -> Router:
    router = Router()
    for engine in engines:
        router.add(engine)
    return router


def test_without_affinity_the_least_loaded_engine_serves():
    assert routed(Engine("a", 3), Engine("b", 1), Engine("c", 2)).choose(prompt(0)).name == "b"


def test_a_prompt_follows_its_prefix_until_an_overload():
    router = routed(Engine("a"), Engine("b"))
    first = router.choose(prompt(0))
    router.charge(first, LOAD_MARGIN)
    longer = [*prompt(0), *prompt(900, PREFIX_BLOCK)]
    assert router.choose(longer) is first
    other = router.choose(longer, salt="another cache")
    assert other is not first
    assert router.choose(prompt(500)) is other
    router.charge(first, 1)
    assert router.choose(longer) is other


def test_a_short_common_prefix_does_not_count():
    router = routed(Engine("a"), Engine("b"))
    first = router.choose(prompt(0, PREFIX_BLOCK))
    router.charge(first, 1)
    assert router.choose([*prompt(0, PREFIX_BLOCK), *prompt(900, 5 * PREFIX_BLOCK)]) is not first


def test_engines_that_lost_their_cache_are_forgotten():
    router = routed(one := Engine("a"), two := Engine("b"))
    first = router.choose(prompt(0))
    router.charge(first, 1)
    router.forget(first.name)
    assert router.choose(prompt(0)) is not first
    router.forget()
    router.charge(one, -one.load)
    router.charge(two, 1)
    assert router.choose(prompt(0)) is one


@settings(max_examples=20)
@given(st.lists(st.text(max_size=8), min_size=1, max_size=40, unique=True), st.integers(0, 4))
def test_only_keys_of_a_leaving_engine_move(keys, leaving):
    engines = [Engine(f"engine-{number}", load=number) for number in range(5)]
    router = routed(*engines)
    before = {key: router.choose([1], key=key) for key in keys}
    gone = engines[leaving]
    elsewhere = {key: router.choose([1], lambda each: each is not gone, key=key) for key in keys}
    router.remove(gone)
    for key in keys:
        after = router.choose([1], key=key)
        assert after is elsewhere[key]
        assert after is before[key] or before[key] is gone
    router.add(gone)
    assert {key: router.choose([1], key=key) for key in keys} == before


def test_keys_spread_over_engines():
    router, counts = routed(*(Engine(name) for name in "abcd")), Counter[str]()
    for number in range(4000):
        counts[router.choose([1], key=str(number)).name] += 1
    assert min(counts[name] for name in "abcd") > 600


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-2, 3), st.booleans()), max_size=60), st.data())
def test_the_least_loaded_engine_that_fits_is_chosen(events, data):
    engines = [Engine(name) for name in "abcde"]
    router, there = routed(*engines), set("abcde")
    for number, work, stays in events:
        engine = engines[number]
        router.charge(engine, max(work, -engine.load))
        (router.add if stays else router.remove)(engine)
        (there.add if stays else there.discard)(engine.name)
    fitting = data.draw(st.sets(st.sampled_from("abcde")))
    able = [engine for engine in engines if engine.name in fitting & there]
    chosen = router.choose([1], lambda engine: engine.name in fitting)
    assert (chosen is None) == (not able)
    assert chosen is None or chosen.load == min(engine.load for engine in able)
    keyed = router.choose([1], lambda engine: engine.name in fitting, key="a key")
    assert (keyed is None and not able) or any(keyed is engine for engine in able)


def test_a_choice_looks_at_few_of_many_engines():
    router, looks = routed(*(Engine(f"engine-{number}") for number in range(1000))), Counter[str]()

    def fits(engine: Engine) -> bool:
        looks[engine.name] += 1
        return True

    for number in range(200):
        router.charge(router.choose(prompt(number), fits), 1)
        router.choose(prompt(number), fits, key=str(number))
    assert looks.total() <= 3 * 200


def test_a_routing_key_holds_in_its_block():
    with routed_by("outer"):
        with routed_by("inner"):
            assert current_routing_key() == "inner"
        assert current_routing_key() == "outer"
    assert current_routing_key() is None


def test_the_memory_of_prefixes_is_bounded():
    router = routed(Engine("a"), Engine("b"))
    for number in range(MAX_PREFIXES // 2 + 10):
        router.choose([number, *prompt(0, 2 * PREFIX_BLOCK - 1)])
    assert len(router.seen) == MAX_PREFIXES


def test_a_key_is_any_text():
    engines = [Engine("a"), Engine("b")]
    for key in ("", "\0", "ключ", "\ud800", "x" * (1 << 20)):
        found = routed(*engines).choose(prompt(0), key=key)
        assert found is routed(*engines[::-1]).choose(prompt(1), key=key)


def one_of(*replies, tp: int = 1):
    return combined(dict(enumerate(replies)), tp)


def status(**changes: object) -> GetStatusReqOutput:
    return msgspec.structs.replace(status_reply(GetStatusReqInput()), **changes)


def total(*statuses: GetStatusReqOutput, serving: list[int], counters: Counters | None = None):
    counters = counters or Counters()
    for number, each in enumerate(statuses):
        counters.take(f"replica-{number}", each)
    return combined_status(dict(enumerate(statuses)), serving, counters=counters, tp=1)


def test_counts_are_added_and_unknown_ones_stay_unknown():
    counts = {"step": 3, "held_requests": 1, "held_tokens": 16, "waiting_requests": 0, "aborted_requests": 2}
    paused = PauseGenerationReqOutput(id="a", mode="abort", owner="http", **counts)
    other = msgspec.structs.replace(paused, owner="somebody")
    reply = one_of(paused, other)
    assert (reply.step, reply.held_tokens, reply.aborted_requests, reply.owner) == (6, 32, 4, "somebody")
    flushed = FlushCacheReqOutput(id="a", freed_tokens=5)
    assert one_of(flushed, flushed).freed_tokens == 10
    assert one_of(flushed, flushed).reserved_before is None
    leases = [RenewPauseLeaseReqOutput(id="a", renewed=True, lease_left_s=left) for left in (2.0, 1.5)]
    assert one_of(*leases).lease_left_s == 1.5
    released = ReleaseMemoryOccupationReqOutput(
        id="a", released_tags=["kv_cache"], freed_bytes={"kv_cache": 7}, reserved_before=9, reserved_after=2
    )
    assert one_of(released, released).freed_bytes == {"kv_cache": 14}


def test_a_trace_has_a_file_of_each_and_one_limit():
    started = [StartProfileReqOutput(id="a", path=path, num_steps=5) for path in ("x", "y")]
    assert one_of(*started) == StartProfileReqOutput(id="a", path="x, y", num_steps=5)
    stopped = [StopProfileReqOutput(id="a", path=path, steps=3) for path in ("x", "y")]
    assert one_of(*stopped) == StopProfileReqOutput(id="a", path="x, y", steps=6)


def test_ranks_are_numbered_through():
    rank = RankMemory(rank=1, reserved_before=4, reserved_after=3)
    reply = ContinueGenerationReqOutput(id="a", was_paused=True, reserved_before=9, freed=1, ranks=[rank])
    whole = one_of(reply, reply, tp=2)
    assert [each.rank for each in whole.ranks] == [1, 3]
    assert (whole.reserved_before, whole.freed, whole.reserved_after) == (18, 2, None)


def test_the_error_for_different_weights_names_the_replicas():
    same = [WeightsCheckerReqOutput(id="a", total="x", changed=[name]) for name in ("b", "a")]
    assert one_of(*same).changed == ["a", "b"]
    with pytest.raises(InternalError, match="replica-1"):
        one_of(same[0], WeightsCheckerReqOutput(id="a", total="y"))


def test_states_are_of_serving_replicas_counts_of_all():
    fine = status(running_requests=2, generation="running", weights="valid", generated_tokens=10)
    broken = status(running_requests=1, weights="poisoned", weights_detail="torn", generated_tokens=5)
    found = total(fine, broken, serving=[0])
    assert (found.weights, found.weights_detail, found.running_requests) == ("valid", None, 3)
    assert found.kv.total == fine.kv.total + broken.kv.total
    assert found.kv.page_size == fine.kv.page_size
    alone = total(fine, broken, serving=[])
    assert (alone.weights, alone.weights_detail) == ("poisoned", "replica-1: torn")


def test_replicas_are_paused_when_all_of_them_are():
    running, paused = status(generation="running"), status(generation="paused", pause_mode="in_place")
    assert total(running, paused, serving=[0, 1]).generation == "running"
    found = total(paused, paused, serving=[0, 1])
    assert (found.generation, found.pause_mode) == ("paused", "in_place")


def test_a_restart_sets_no_counter_back():
    counters = Counters()
    first = [status(incarnation="a", generated_tokens=10), status(incarnation="b", generated_tokens=7)]
    assert total(*first, serving=[0, 1], counters=counters).generated_tokens == 17
    again = [status(incarnation="c", generated_tokens=1), first[1]]
    assert total(*again, serving=[0, 1], counters=counters).generated_tokens == 18
    third = [status(incarnation="d", generated_tokens=0), first[1]]
    assert total(*third, serving=[0, 1], counters=counters).generated_tokens == 18


def test_histograms_of_samples_are_added():
    one = EngineTotals(staleness=Distribution(counts=[3, 1], sum=1.0))
    none = EngineTotals()
    found = total(status(totals=one), status(totals=one), status(totals=none), serving=[0, 1, 2])
    assert found.totals.staleness == Distribution(counts=[6, 2], sum=2.0)
    assert found.totals.queue_time == Distribution()


FIRST = DriftReport(weights_epoch=1, weight_version="a", samples=1, state="warn")
GAPS = [np.random.default_rng(seed).normal(0.1, 0.4, 20 + 30 * seed) for seed in range(3)]


def drift_of(gaps: np.ndarray) -> DriftReport:
    ratios, size = np.exp(gaps), np.abs(gaps)
    figures = {
        "tokens": len(gaps),
        "mean_abs": size.mean(),
        "p99": np.quantile(size, 0.99, method="higher"),
        "max_abs": size.max(),
        "k1": -gaps.mean(),
        "k3": (ratios - 1 - gaps).mean(),
        "ess": ratios.sum() ** 2 / (len(gaps) * (ratios**2).sum()),
        "clip_share": (size > np.log(2)).mean(),
    }
    parts = [DriftPart(by="span", name="clean", **figures)]
    return msgspec.structs.replace(FIRST, **figures, parts=parts, update=DriftUpdate(**figures))


def test_drift_of_several_engines_is_that_of_all_tokens():
    replies = [CheckDriftReqOutput(id="x", report=report) for report in (*map(drift_of, GAPS), FIRST)]
    report = combined(dict(enumerate(replies)), 1).report
    whole = drift_of(np.concatenate(GAPS))
    for ours, theirs in ((report, whole), (report.update, whole.update), (report.parts[0], whole.parts[0])):
        for name in DriftUpdate.__struct_fields__:
            if name != "p99":
                assert getattr(ours, name) == pytest.approx(getattr(theirs, name)), name
        assert ours.p99 >= theirs.p99
    assert (report.samples, report.state) == (4, "warn")


def test_engines_far_from_their_weights_are_combined():
    replies = [CheckDriftReqOutput(id="x", report=drift_of(np.full(9, -40.0))) for _ in range(2)]
    report = combined(dict(enumerate(replies)), 1).report
    assert (report.tokens, report.k1, report.ess) == (18, pytest.approx(40.0), pytest.approx(1.0))
