"""vLLM's weight transfer before an engine that a test scripts."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.fake_scheduler import FakeScheduler, answer
from support.waiting import PATIENCE_S

from caesura.client.serve.vllm import transfer
from caesura.io_struct import (
    AbortReq,
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    DestroyWeightsUpdateGroupReqInput,
    DestroyWeightsUpdateGroupReqOutput,
    EndWeightUpdateReqInput,
    ErrorCode,
    ErrorReply,
    InitWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqOutput,
    Message,
    Request,
    UpdateWeightsFromDistributedReqInput,
)

GROUP = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": 29500, "world_size": 2}
DEAD = 29501
"""Port of a trainer whose ranks never come."""
PART = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}


class Engine:
    """Numbers its sessions, and answers no broadcast before it is told to."""

    def __init__(self) -> None:
        self.sessions = itertools.count()
        self.updates: list[UpdateWeightsFromDistributedReqInput] = []

    def __call__(self, request: Request) -> Iterable[Message]:
        match request:
            case InitWeightsUpdateGroupReqInput() if request.master_port == DEAD:
                return []
            case InitWeightsUpdateGroupReqInput():
                return [InitWeightsUpdateGroupReqOutput(id=request.id, rank=1, world_size=2)]
            case DestroyWeightsUpdateGroupReqInput():
                return [DestroyWeightsUpdateGroupReqOutput(id=request.id)]
            case BeginWeightUpdateReqInput():
                session = f"s{next(self.sessions)}"
                return [BeginWeightUpdateReqOutput(id=request.id, session_id=session, weights_epoch=0)]
            case UpdateWeightsFromDistributedReqInput():
                self.updates.append(request)
                return []
        return answer(request)


@pytest.fixture
def served(serve: Callable) -> Iterator[tuple[Engine, FakeScheduler, httpx.Client]]:
    engine = Engine()
    fake, server = serve(engine)
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        yield engine, fake, http


def call(http: httpx.Client, path: str, **body: object) -> int:
    return http.post(path, json=body).status_code


def test_a_late_failure_leaves_the_next_update_alone(served):
    engine, fake, http = served
    assert call(http, "/init_weight_transfer_engine", init_info=GROUP) == 200
    assert call(http, "/start_weight_update") == 200
    with ThreadPoolExecutor() as threads:
        late = threads.submit(call, http, "/update_weights", update_info=PART)
        fake.next_request(UpdateWeightsFromDistributedReqInput)
        assert call(http, "/update_weights", update_info={**PART, "shapes": []}) == 400
        assert call(http, "/start_weight_update") == 200
        again = threads.submit(call, http, "/update_weights", update_info=PART)
        fake.next_request(UpdateWeightsFromDistributedReqInput)
        first, second = engine.updates
        assert (first.session_id, second.session_id) == ("s0", "s1")
        fake.push(ErrorReply(id=first.id, code=ErrorCode.NO_SESSION, message="it has ended"))
        assert late.result() == 400
        repeated = threads.submit(call, http, "/update_weights", update_info=PART)
        reply = next(iter(answer(EndWeightUpdateReqInput(id=second.id))))
        fake.push(reply)
        assert (again.result(), repeated.result()) == (200, 200)
    assert engine.updates == [first, second]
    assert call(http, "/finish_weight_update", weight_version="new") == 200


def test_a_repeated_init_joins_an_engine_that_has_restarted(served):
    _, fake, http = served
    for _ in range(2):
        assert call(http, "/init_weight_transfer_engine", init_info=GROUP) == 200
        fake.next_request(InitWeightsUpdateGroupReqInput, timeout=PATIENCE_S)


def test_an_init_that_waits_for_ranks_holds_up_nobody(served):
    _, fake, http = served
    with ThreadPoolExecutor() as threads:
        given = {**GROUP, "master_port": DEAD}
        waiting = [threads.submit(call, http, "/init_weight_transfer_engine", init_info=given)]
        asked = fake.next_request(InitWeightsUpdateGroupReqInput, timeout=PATIENCE_S)
        assert asked.timeout_s == 60
        waiting.append(threads.submit(call, http, "/init_weight_transfer_engine", init_info=given))
        for path, body in (
            ("/init_weight_transfer_engine", {"init_info": GROUP}),
            ("/start_weight_update", {}),
        ):
            error = http.post(path, json=body).json()["error"]
            assert error["code"] == "busy"
            assert "up to 60 s for the ranks at 127.0.0.1:29501" in error["message"]
        ended = threads.submit(call, http, "/shutdown_weight_transfer_engine")
        fake.next_request(DestroyWeightsUpdateGroupReqInput, timeout=PATIENCE_S)
        fake.push(ErrorReply(id=asked.id, code=ErrorCode.GROUP_ERROR, message="destroyed"))
        assert ([each.result() for each in waiting], ended.result()) == ([400, 400], 200)
    assert call(http, "/init_weight_transfer_engine", init_info=GROUP) == 200


def test_an_abort_of_many_names_is_one_message(served):
    _, fake, http = served
    names = [f"r{i}" for i in range(10_000)]
    assert call(http, "/abort_requests", request_ids=names) == 200
    assert fake.next_request(AbortReq).rid == names


def test_a_silent_trainer_without_a_store_is_replaced(served, monkeypatch):
    engine, fake, http = served
    monkeypatch.setattr(transfer, "_REPEATED_S", 0.0)
    assert call(http, "/init_weight_transfer_engine", init_info=GROUP) == 200
    assert call(http, "/start_weight_update") == 200
    with ThreadPoolExecutor() as threads:
        running = threads.submit(call, http, "/update_weights", update_info=PART)
        fake.next_request(UpdateWeightsFromDistributedReqInput)
        other = {"backend": "disk"}
        assert call(http, "/init_weight_transfer_engine", init_info=other) == 409
        fake.push(next(iter(answer(EndWeightUpdateReqInput(id=engine.updates[0].id)))))
        assert running.result() == 200
    assert call(http, "/init_weight_transfer_engine", init_info=other) == 200
    aborted = fake.next_request(EndWeightUpdateReqInput)
    assert (aborted.session_id, aborted.commit) == ("s0", False)
