"""Captured decode steps against eager ones."""

import logging
import random
from dataclasses import dataclass, replace

import pytest
import torch
from support import fake_flashinfer
from support.checkpoints import make_checkpoint
from support.forward_batches import Row, attention_shape, forward_batch, greedy_sampling, load_model
from support.recorded_graphs import RecordingDevice, without_compiled_kernels

from caesura.scheduler.attention.flashinfer import FlashInferBackend
from caesura.scheduler.attention.sdpa import SdpaBackend
from caesura.scheduler.cache.pool import MHAPool
from caesura.scheduler.execution.forward import ForwardBatch, StepLimits
from caesura.scheduler.execution.graphs import coarse_first, ladder
from caesura.scheduler.execution.model_runner import ModelRunner
from caesura.scheduler.execution.sampler import Sampler
from caesura.scheduler.executor.executor import Pending
from caesura.scheduler.executor.parallel_runner import ParallelRunner
from caesura.scheduler.executor.rpc import Answer, Failure
from caesura.scheduler.memory.host import HOST
from caesura.scheduler.memory.residency import ComponentResidencyManager, StorageComponent
from caesura.scheduler.parallel.group import SINGLE, TensorParallel

CPU = torch.device("cpu")
LIMITS = StepLimits.of(max_rows=11, chunk_tokens=260, context_len=120)
PAGES = 100


@pytest.fixture(autouse=True)
def small_and_plain(monkeypatch):
    without_compiled_kernels(monkeypatch)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folders = [tmp_path_factory.mktemp("graphs") / str(seed) for seed in range(2)]
    for seed, folder in enumerate(folders):
        make_checkpoint(folder, "qwen3", seed=seed)
    return [str(folder) for folder in folders]


@dataclass
class Request:
    tokens: list[int]
    slot: int
    pages: list[int]
    computed: int = 0


@dataclass
class Engine:
    """A runner over a pool of its own."""

    runner: ModelRunner
    pool: MHAPool
    memory: ComponentResidencyManager
    device: RecordingDevice | None = None


def engine(
    path: str,
    *,
    captured: bool,
    parallel: TensorParallel = SINGLE,
    make_device: type[RecordingDevice] = RecordingDevice,
) -> Engine:
    """``captured``: on a device of graphs, with FlashInfer; else on the host, by torch."""
    model = load_model(path, torch.float32)
    config = model.config
    memory = ComponentResidencyManager(CPU, make_component=StorageComponent)
    with memory.component("kv_cache"):
        pool = MHAPool(
            num_layers=config.num_layers,
            num_pages=PAGES,
            kv_heads=config.num_kv_heads,
            head_size=config.head_dim,
            dtype=torch.float32,
        )
    for layer in range(config.num_layers):
        for storage in pool.layer(layer):
            storage[1:] = torch.nan
    shape = attention_shape(pool, config.num_heads)
    device = make_device() if captured else None
    backend = SdpaBackend(pool, shape)
    if captured:
        backend = FlashInferBackend(pool, shape, LIMITS, fake_flashinfer)
    runner = ModelRunner(
        model,
        backend,
        Sampler(config.vocab_size, LIMITS.rows, CPU, torch.float32),
        limits=LIMITS,
        device=CPU,
        device_module=device or HOST,
        parallel=parallel,
    )
    return Engine(runner, pool, memory, device)


def step(decode: list[Request], prefill: list[Request]) -> ForwardBatch:
    """One token of each ``decode`` request and all prompt tokens of each ``prefill`` request."""
    requests = decode + prefill
    rows = [Row(r.tokens[r.computed :], r.computed, r.pages) for r in requests]
    batch = forward_batch(rows, len(decode))
    slots = torch.tensor([r.slot for r in requests])
    ends = torch.tensor(batch.q_lens_host).cumsum(0) - 1
    batch.input_ids[: len(decode)] = 0  # the runner knows them
    for request in requests:
        request.computed = len(request.tokens)
    return replace(
        batch,
        slots=slots,
        sample_tokens=ends,
        sample_slots=slots,
        sampling=replace(greedy_sampling(len(requests)), want_raw=len(requests) % 2 == 0),
    )


def requests(count: int) -> list[Request]:
    rng = random.Random(count)
    pages = list(range(1, PAGES))
    rng.shuffle(pages)
    return [
        Request(
            [rng.randrange(3, 97) for _ in range(rng.randrange(1, 24))], slot, [pages.pop() for _ in range(6)]
        )
        for slot in rng.sample(range(LIMITS.rows), count)
    ]


def run_both(pair: list[Engine], batch: ForwardBatch, sampled: list[Request]) -> None:
    outputs = []
    for each in pair:
        # Each gets its own inputs: a runner may write into them.
        own = replace(batch, input_ids=batch.input_ids.clone())
        outputs.append(each.runner.execute(own).fetch())
    ours, reference = outputs
    assert ours.token_ids.tolist() == reference.token_ids.tolist()
    for name in ("logprobs", "raw_logprobs", "sampled_logprobs"):
        found, expected = getattr(ours, name), getattr(reference, name)
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=1e-4)
    for request, token in zip(sampled, ours.token_ids.tolist(), strict=True):
        request.tokens.append(token)
    for layer in range(pair[0].pool.num_layers):
        for mine, theirs in zip(pair[0].pool.layer(layer), pair[1].pool.layer(layer), strict=True):
            torch.testing.assert_close(mine[1:], theirs[1:], atol=1e-4, rtol=1e-4, equal_nan=True)


def capture(of: Engine) -> int:
    assert of.runner.graphs is not None
    return sum(1 for _ in of.runner.graphs.capture())


def both(path: str) -> list[Engine]:
    pair = [engine(path, captured=True), engine(path, captured=False)]
    assert capture(pair[0]) == len(ladder(LIMITS.rows))
    return pair


def test_the_ladder():
    assert ladder(1) == [1]
    assert ladder(11) == [1, 2, 4, 8, 11]
    assert ladder(256) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, *range(64, 256, 16), 256]
    assert ladder(1000)[-3:] == [896, 960, 1000]
    for largest in (1, 3, 100, 700):
        sizes = ladder(largest)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest


@pytest.mark.parametrize("largest", [1, 2, 3, 11, 100, 256, 1000])
def test_coarse_sizes_alone_pad_no_step_to_twice_its_rows(largest):
    sizes = ladder(largest)
    order = coarse_first(sizes)
    assert sorted(order) == sizes
    coarse = order[: order.index(1) + 1]
    assert coarse[0] == largest
    assert len(coarse) <= largest.bit_length() + 1
    for rows in range(1, largest + 1):
        assert min(size for size in coarse if size >= rows) < max(2 * rows, 2)


class CrowdedDevice(RecordingDevice):
    """Each capture takes a tenth of its memory."""

    def mem_get_info(self) -> tuple[int, int]:
        return (1 << 30) - self.captures * (1 << 30) // 10, 1 << 30


def test_sizes_that_do_not_fit_the_device_run_eagerly(checkpoints, caplog):
    one = engine(checkpoints[0], captured=True, make_device=CrowdedDevice)
    reference = engine(checkpoints[0], captured=False)
    assert capture(one) == 4
    assert "1 of 5 sizes of decode steps are not captured: the device's memory is short" in caplog.text
    assert list(one.runner.graphs.captured) == [11, 8, 4, 2]
    assert capture(one) == 0, "it is not tried again"
    for count, replayed in ((3, 2), (1, 0)):
        some, before = requests(count), one.device.replays
        run_both([one, reference], step([], some), some)
        run_both([one, reference], step(some, []), some)
        assert one.device.replays == before + replayed


class RefusingGroup(TensorParallel):
    """Two ranks, of which the other refuses the agreements of these numbers."""

    def __init__(self, *refused: int) -> None:
        super().__init__(0, 2)
        self.refused, self.asked = refused, 0

    def all_reduce(self, x: torch.Tensor) -> None:
        x += self.asked in self.refused
        self.asked += 1


@pytest.mark.parametrize(
    ("refused", "sizes"),
    [((), [11, 8, 4, 2, 1]), ((1,), []), ((4,), [11, 8]), ((8,), []), ((100,), [11, 8, 4, 2, 1])],
    ids=["none", "failed before", "third size", "failed", "memory moved"],
)
def test_ranks_capture_the_same_sizes(checkpoints, refused, sizes):
    group = RefusingGroup(*refused)
    one = engine(checkpoints[0], captured=True, parallel=group)
    capture(one)
    assert list(one.runner.graphs.captured) == sizes
    before, group.asked = one.device.captures, 100
    capture(one)
    assert (one.device.captures > before) == (100 in refused or not sizes)


@pytest.mark.parametrize("count", [1, 3, 8, 11])
def test_decode_steps_are_replayed_and_equal_eager_ones(checkpoints, count):
    pair, all_requests = both(checkpoints[0]), requests(count)
    each, with_one_more = (2, 1) if count % 2 else (1, 2)
    run_both(pair, step([], all_requests), all_requests)
    assert pair[0].device.replays == 0
    for _ in range(20):
        run_both(pair, step(all_requests, []), all_requests)
    assert pair[0].device.replays == 20 * each
    if count < LIMITS.rows:
        late = Request([5, 6, 7], min(set(range(LIMITS.rows)) - {r.slot for r in all_requests}), [99])
        used = {page for r in all_requests for page in r.pages}
        late.pages = [next(page for page in range(1, PAGES) if page not in used)]
        everybody = [*all_requests, late]
        run_both(pair, step(all_requests, [late]), everybody)
        assert pair[0].device.replays == 20 * each, "a mixed step runs eagerly"
        for _ in range(3):
            run_both(pair, step(everybody, []), everybody)
        assert pair[0].device.replays == 20 * each + 3 * with_one_more
    run_both(pair, step(all_requests[::2], []), all_requests[::2])


class Group:
    """Ranks whose connection is memory that captured collectives read, as NCCL's communicator is."""

    rank, size, compiled = 0, 2, None

    def __init__(self) -> None:
        self.reset()

    def all_reduce(self, x: torch.Tensor) -> None:
        x.mul_(self._connection)

    def abort(self) -> None:
        self._connection = torch.full((1,), torch.nan)

    def reset(self) -> None:
        self._connection = torch.ones(1)


class OtherRank:
    """An executor whose one worker answers every call."""

    workers = 1

    def __init__(self, parallel: Group) -> None:
        self.parallel = parallel
        self.calls: list[str] = []
        self.failing = False

    def call(self, method: str, *arguments: object, frames: object = ()) -> Pending:
        self.calls.append(method)
        failure = Failure(message="a kernel") if self.failing else None
        self.failing = False
        number = len(self.calls)
        return Pending(self, number, method, {1: Answer(number=number, failure=failure)}, None)

    def receive(self) -> None:
        """Do nothing: every answer has come."""

    def forget(self, number: int) -> None:
        """Do nothing: no answer is due."""


def test_graphs_are_captured_again_with_a_new_group(checkpoints):
    pair, all_requests = [engine(checkpoints[0], captured=c) for c in (True, False)], requests(3)
    own, group = pair[0].runner, Group()
    other = OtherRank(group)
    forward = own.model.forward

    def in_parts(batch: ForwardBatch, backend: object) -> torch.Tensor:
        hidden = forward(batch, backend)
        group.all_reduce(hidden)
        return hidden

    own.model.forward = in_parts
    capture(pair[0])
    pair[0].runner = ParallelRunner(own, other, own.graphs)
    batch = step([], all_requests)
    other.failing = True
    with pytest.raises(RuntimeError, match="rank 1: a kernel"):
        pair[0].runner.execute(replace(batch, input_ids=batch.input_ids.clone())).fetch()
    assert other.calls == ["execute", "recover", "capture"], "every rank captures at the same time"
    assert own.graphs.are_captured
    run_both(pair, batch, all_requests)
    for _ in range(3):
        run_both(pair, step(all_requests, []), all_requests)
    assert pair[0].device.replays == 6


def sampled(batch: ForwardBatch, **options: object) -> ForwardBatch:
    rows = len(batch.sample_tokens)
    greedy = torch.arange(rows) % 3 == 0
    uniforms = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
    values = {
        "temperature": torch.where(greedy, 1.0, torch.linspace(0.5, 2, rows)),
        "greedy": greedy,
        "uniforms": uniforms,
        "any_sampled": True,
        "want_raw": False,
        "want_sampled": True,
        **options,
    }
    return replace(batch, sampling=replace(batch.sampling, **values))


@pytest.mark.parametrize("count", [1, 6, 11])
def test_head_and_sampler_are_replayed_as_captured(checkpoints, count):
    pair, all_requests = both(checkpoints[0]), requests(count)
    run_both(pair, sampled(step([], all_requests)), all_requests)
    launched = watched_head(pair[0])
    for _ in range(3):
        run_both(pair, sampled(step(all_requests, [])), all_requests)
    assert (pair[0].device.replays, launched) == (6, [])
    run_both(pair, sampled(step(all_requests, []), want_sampled=False), all_requests)
    assert (pair[0].device.replays, launched) == (8, [])
    top_k = torch.full((count,), 3)
    for options in ({"any_filtered": True, "top_k": top_k, "largest_top_k": 3}, {"want_raw": True}):
        launched.clear()
        before = pair[0].device.replays
        run_both(pair, sampled(step(all_requests, []), **options), all_requests)
        assert (pair[0].device.replays, launched) == (before + 1, [count]), "only the hidden states"
    run_both(pair, sampled(step(all_requests, [])), all_requests)
    assert launched == [count]


def watched_head(of: Engine) -> list[int]:
    launched: list[int] = []
    logits = of.runner.model.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor | None:
        launched.append(len(hidden))
        return logits(hidden)

    of.runner.model.logits = watched
    return launched


def test_the_graph_keeps_its_logits_when_the_workspace_grows(checkpoints):
    pair, all_requests = both(checkpoints[0]), requests(3)
    run_both(pair, sampled(step([], all_requests)), all_requests)
    for each in pair:
        assert each.runner.model.logits(torch.zeros(50, each.runner.model.config.hidden_size)).shape[0] == 50
    for _ in range(2):
        run_both(pair, sampled(step(all_requests, [])), all_requests)
    assert pair[0].device.replays == 4


def test_a_capture_changes_no_slots_last_token(checkpoints):
    one, all_requests = engine(checkpoints[0], captured=True), requests(11)
    one.runner.execute(sampled(step([], all_requests)))
    before = one.runner.last_tokens[: LIMITS.rows].clone()
    capture(one)
    assert one.runner.graphs.are_captured
    assert torch.equal(one.runner.last_tokens[: LIMITS.rows], before)


def test_without_a_capturable_head_graphs_compute_hidden_states(checkpoints, caplog):
    pair, all_requests = [engine(checkpoints[0], captured=c) for c in (True, False)], requests(3)
    pair[0].device.forbidden = (torch.ops.aten.searchsorted.Tensor,)
    with caplog.at_level(logging.WARNING):
        assert capture(pair[0]) == len(ladder(LIMITS.rows))
    assert caplog.text.count("head and sampler are launched kernel by kernel") == 1
    run_both(pair, sampled(step([], all_requests)), all_requests)
    for _ in range(2):
        run_both(pair, sampled(step(all_requests, [])), all_requests)
    assert pair[0].device.replays == 2


class CompileError(Exception):
    """Stand-in for Triton's error of the same name, which is no RuntimeError."""


def forbid_an_operation(one: Engine) -> None:
    one.device.forbidden = (torch.ops.aten.silu.default,)


def break_a_kernel(one: Engine) -> None:
    make = one.runner.graphs.backend.for_decode

    def failing(rows: int):
        made = make(rows)

        def forward(*of: object) -> None:
            raise CompileError("out of resource: shared memory")

        made.forward = forward
        return made

    one.runner.graphs.backend.for_decode = failing


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (forbid_an_operation, "not permitted when stream is capturing"),
        (break_a_kernel, "out of resource: shared memory"),
    ],
)
def test_uncapturable_steps_run_eagerly_with_a_warning(checkpoints, caplog, spoil, reason):
    pair, all_requests = [engine(checkpoints[0], captured=c) for c in (True, False)], requests(2)
    spoil(pair[0])
    with caplog.at_level(logging.WARNING):
        assert capture(pair[0]) == 0
    assert reason in caplog.text
    pair[0].device.forbidden = ()
    assert capture(pair[0]) == 0, "it is not tried again"
    run_both(pair, step([], all_requests), all_requests)
    run_both(pair, step(all_requests, []), all_requests)
    assert pair[0].device.replays == 0


def test_a_shortage_of_memory_may_pass(checkpoints, caplog):
    one = engine(checkpoints[0], captured=True)
    make, given = one.runner.graphs.backend.for_decode, []

    def short(rows: int):
        if len(given) == 2:
            raise torch.OutOfMemoryError("no memory for graphs")
        given.append(rows)
        return make(rows)

    one.runner.graphs.backend.for_decode = short
    with caplog.at_level(logging.WARNING):
        assert capture(one) == 2
    assert "no memory for graphs" in caplog.text
    assert not one.runner.graphs.are_captured, "half a ladder serves nobody"
    one.runner.graphs.backend.for_decode = make
    assert capture(one) == len(one.runner.graphs.sizes)


def test_workspaces_have_grown_before_the_first_capture(checkpoints):
    one, longest = engine(checkpoints[0], captured=True), []
    forward = one.runner.model.forward

    def watched(batch, backend):
        longest.append(len(batch.input_ids))
        return forward(batch, backend)

    one.runner.model.forward = watched
    capture(one)
    assert longest[0] == LIMITS.tokens == 271
    assert longest[1:] == [size for size in reversed(ladder(LIMITS.rows)) for _ in range(2)]


def test_steps_wait_for_the_scheduling_stream_and_it_for_them(checkpoints):
    pair, all_requests = both(checkpoints[0]), requests(2)
    log = pair[0].device.log
    for batch in (step([], all_requests), None):
        log.clear()
        run_both(pair, batch or step(all_requests, []), all_requests)
        assert log == ["wait", "enter", "leave", "wait"]


def test_graphs_need_a_capable_backend_and_the_option(checkpoints):
    model = load_model(checkpoints[0], torch.float32)
    pool = MHAPool(num_layers=2, num_pages=2, kv_heads=2, head_size=12, dtype=torch.float32)
    sampler = Sampler(97, 1, CPU, torch.float32)
    limits = StepLimits.of(max_rows=1, chunk_tokens=1, context_len=16)

    def graphs(backend, **options):
        return ModelRunner(model, backend, sampler, limits=limits, device=CPU, **options).graphs

    shape = attention_shape(pool, 4)
    able = FlashInferBackend(pool, shape, limits, fake_flashinfer)
    assert graphs(able, device_module=RecordingDevice()) is not None
    assert graphs(able, device_module=RecordingDevice(), graph_rows=0) is None
    assert graphs(able, device_module=HOST) is None
    assert graphs(SdpaBackend(pool, shape), device_module=RecordingDevice()) is None
