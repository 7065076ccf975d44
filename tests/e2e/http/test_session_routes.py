"""Sessions of a real engine: exact ids over pauses and updates, branches, training samples, ends."""

import base64

import httpx
import openai
import pytest
from support.http_server import listening
from support.openai_server import CONTEXT, NAME, messages

from caesura.client.exceptions import SessionGone
from caesura.client.text import TextClient


def chat(served, said, session, **more):
    extra = {"ignore_eos": True, "return_token_ids": True, **more.pop("extra_body", {})}
    headers = {} if session is None else {"X-Session-ID": session}
    return served.client.chat.completions.create(
        model=NAME, messages=said, extra_headers=headers, extra_body=extra, **{"max_tokens": 24, **more}
    )


def call(served, method, path, **more):
    return httpx.request(method, f"{served.url}{path}", headers={"authorization": "Bearer secret"}, **more)


def ids_of(choice):
    return choice.prompt_token_ids + choice.token_ids


def further(said, choice, text="on"):
    return [*said, {"role": "assistant", "content": choice.message.content}, *messages(text)]


def test_turns_extend_the_sampled_ids_whatever_happens_between(served):
    said, before = messages("Go"), []
    for turn in range(1, 5):
        answer = chat(served, said, "steady")
        (choice,) = answer.choices
        assert choice.prompt_token_ids[: len(before)] == before
        told = choice.session
        assert (told["turn"], told["branch"], told["reused_tokens"]) == (turn, None, len(before))
        before, said = ids_of(choice), further(said, choice)
        if turn == 1:
            assert chat(served, said, "steady-other").choices[0].session["turn"] == 1
            served.engine.pause("retract")
            served.engine.continue_generation()
        if turn == 2:
            served.engine.update_weights_from_disk(str(served.path), weight_version="second")
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert (cached > 0) == (turn in (2, 4)), "an update empties the prefix cache"
    found = call(served, "GET", "/sessions/steady").json()
    (sample,) = found["samples"]
    assert sample["token_ids"] == before
    assert sum(sample["mask"]) == 4 * 24
    assert [span["version"] for span in sample["weight_versions"]][-1] == "second"
    sampled = [value for value, mask in zip(sample["logprobs"], sample["mask"], strict=True) if mask]
    assert all(value < 0 for value in sampled)
    assert call(served, "GET", "/sessions/steady/samples").json() == found


def test_streams_and_several_samples_are_recorded(served):
    finals, new = {}, {}
    for chunk in chat(served, messages("Go"), "streamed", stream=True, n=2):
        for choice in chunk.choices:
            new.setdefault(choice.index, []).extend(choice.token_ids)
            if choice.finish_reason:
                finals[choice.index] = choice.session
    assert {told["turn"] for told in finals.values()} == {1}
    samples = call(served, "GET", "/sessions/streamed").json()["samples"]
    ends = [[t for t, mask in zip(each["token_ids"], each["mask"], strict=True) if mask] for each in samples]
    assert sorted(ends) == sorted(new.values())
    again = chat(served, messages("Go"), "streamed")
    assert again.choices[0].session["branch"] == "sibling"
    edited = [*messages("Go"), {"role": "assistant", "content": "edited"}, *messages("on")]
    told = chat(served, edited, "streamed").choices[0].session
    assert (told["branch"], told["parent"], told["reused_tokens"]) == ("history_changed", None, 0)


def test_an_ended_session_says_so(served):
    path = "/sessions/ended/v1/chat/completions"
    body = {"model": NAME, "messages": messages("Go"), "max_tokens": 2}
    told = call(served, "POST", path, json=body).json()["choices"][0]["session"]
    assert told["id"] == "ended"
    assert call(served, "DELETE", "/sessions/ended").json()["finished"]
    with pytest.raises(openai.NotFoundError, match="it was finished") as caught:
        chat(served, messages("Go"), "ended")
    assert caught.value.code == "session_gone"
    for method in ("GET", "DELETE"):
        assert call(served, method, "/sessions/ended").status_code == 404
    assert call(served, "POST", "/sessions", json={"session_id": "ended"}).status_code == 200
    assert chat(served, messages("Go"), "ended").choices[0].session["turn"] == 1
    name = call(served, "POST", "/open_session", json={"capacity_of_str_len": 1000}).json()
    assert call(served, "POST", "/close_session", json={"session_id": name}).status_code == 200
    assert call(served, "POST", "/finish_session", json={"session_id": name}).status_code == 404
    with pytest.raises(openai.BadRequestError, match="different sessions"):
        chat(served, messages("Go"), "ended", extra_body={"session_id": "other"})


def respond(served, text="Go", **fields):
    body = {
        "model": NAME,
        "input": text,
        "max_output_tokens": 12,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return call(served, "POST", "/v1/responses", json={**body, **fields}).json()


def test_a_kept_response_is_gone_on_from_by_its_ids(served):
    first, other = respond(served, seed=1), respond(served, seed=2)
    assert (first["session"]["turn"], first["session"]["parent"]) == (1, None)
    assert first["session"]["id"] != other["session"]["id"]
    second = respond(served, "on", previous_response_id=first["id"])
    known = first["prompt_token_ids"] + first["token_ids"]
    assert second["prompt_token_ids"][: len(known)] == known
    told = {"id": first["session"]["id"], "turn": 2, "parent": 1, "reused_tokens": len(known), "branch": None}
    assert second["session"] == told
    (sample,) = call(served, "GET", f"/sessions/{told['id']}").json()["samples"]
    assert sample["token_ids"] == second["prompt_token_ids"] + second["token_ids"]
    for answer in (first, second):
        assert call(served, "DELETE", f"/v1/responses/{answer['id']}").status_code == 200
    assert call(served, "GET", f"/sessions/{told['id']}").status_code == 404
    kept = respond(served, session_id="named")
    after = respond(served, "on", previous_response_id=kept["id"])
    assert (after["session"]["id"], after["session"]["parent"]) == ("named", 1)
    briefed = respond(served, "on", previous_response_id=kept["id"], instructions="Be brief.")
    assert briefed["session"]["branch"] == "history_changed"


def test_kept_responses_belong_to_the_key_that_made_them(served):
    kept = respond(served, rid="mine")
    assert respond(served, "other", rid="mine")["error"]["param"] == "rid"
    path = f"{served.url}/v1/responses/mine"
    assert httpx.get(path, headers={"x-api-key": "secret"}).json() == kept
    keys = {"endpoint": served.engine.endpoint, "connect_timeout": None, "tokenizer": served.tokenizer}
    with listening(context_length=CONTEXT, served_model_name=NAME, **keys) as door:
        body = {"model": NAME, "input": "Go", "rid": "ours", "max_output_tokens": 2, "store": True}
        path = f"{door.url}/v1/responses"
        answers = {}
        for key in ("one", "two"):
            mine = {"authorization": f"Bearer {key}"}
            answers[key] = httpx.post(path, json={**body, "input": key}, headers=mine).json()
        for key, answer in answers.items():
            mine = {"authorization": f"Bearer {key}"}
            assert httpx.get(f"{path}/ours", headers=mine).json() == answer
        assert httpx.get(f"{path}/ours").status_code == 404


@pytest.mark.parametrize("front", ["chat/completions", "responses", "messages"])
def test_what_is_only_rendered_is_no_turn(served, front):
    body = {"model": NAME, "messages": messages("Go"), "max_tokens": 4, "session_id": f"shown-{front}"}
    body |= {"input": "Go"} if front == "responses" else {}
    routes = ["render", "count_tokens"] if front == "messages" else ["render"]
    for _ in range(2):
        for route in routes:
            assert call(served, "POST", f"/v1/{front}/{route}", json=body).status_code == 200
    answer = call(served, "POST", f"/v1/{front}", json=body).json()
    assert answer.get("session", answer.get("choices", [{}])[0].get("session"))["turn"] == 1


def test_a_sample_has_the_experts_of_all_its_tokens(served):
    said = messages("Go")
    for _ in range(2):
        answer = chat(served, said, "routed", extra_body={"return_routed_experts": True})
        said = further(said, answer.choices[0])
    (sample,) = call(served, "GET", "/sessions/routed").json()["samples"]
    routed = sample["routed_experts"]
    rows, layers, chosen = routed["shape"]
    assert rows == len(sample["token_ids"]) - 1
    raw = base64.b64decode(routed["data"])
    assert len(raw) == rows * layers * chosen * (2 if routed["dtype"] == "U16" else 1)
    again = {"input_ids": sample["token_ids"], "return_routed_experts": True, "routed_experts_dtype": "uint8"}
    again |= {"sampling_params": {"max_new_tokens": 1}}
    meta = call(served, "POST", "/generate", json=again).json()["meta_info"]
    assert base64.b64decode(meta["routed_experts"])[: len(raw)] == raw


def generate(served, text, name, session="params", **params):
    sampling = {"max_new_tokens": 6, "ignore_eos": True}
    fields = {"rid": name, "session_params": {"id": session, **params}, "return_prompt_token_ids": True}
    return call(served, "POST", "/generate", json={"text": text, "sampling_params": sampling, **fields})


def test_ids_with_slashes_are_percent_encoded_in_paths(served):
    name, path = "task/1 %2F", "/sessions/task%2f1%20%252F"
    assert call(served, "POST", "/sessions", json={"session_id": name}).status_code == 200
    body = {"model": NAME, "messages": messages("Go"), "max_tokens": 2}
    answer = call(served, "POST", f"{path}/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["session"]["id"] == name
    for end in ("", "/samples"):
        found = call(served, "GET", f"{path}{end}").json()
        assert (found["session_id"], len(found["samples"])) == (name, 1)
    zero_bytes = path.replace("%2f", "%00")
    assert call(served, "GET", zero_bytes).status_code == 400, "this is another id"
    assert call(served, "DELETE", path).json()["session_id"] == name
    kept = respond(served, rid="r/1")
    assert call(served, "GET", "/v1/responses/r%2F1").json() == kept
    assert call(served, "DELETE", "/v1/responses/r%2F1").json()["deleted"]


def test_a_kept_response_has_the_logprobs_it_asked_for(served):
    asked = respond(served, include=["message.output_text.logprobs"])
    unasked, named = respond(served), respond(served, session_id="with")
    for answer, expected in [(unasked, False), (asked, True), (named, True)]:
        (sample,) = call(served, "GET", f"/sessions/{answer['session']['id']}").json()["samples"]
        assert (sample["logprobs"] is not None) == expected
    after = respond(served, "on", previous_response_id=asked["id"])
    (sample,) = call(served, "GET", f"/sessions/{after['session']['id']}").json()["samples"]
    assert (sample["logprobs"], len(sample["turns"])) == (None, 2)


def test_sglangs_session_params(served):
    assert generate(served, "Go", "a").status_code == 404
    call(served, "POST", "/open_session", json={"session_id": "params", "capacity_of_str_len": 1000})
    first = generate(served, "Go", "a").json()
    second = generate(served, "on", "b", rid="a").json()
    known = first["prompt_token_ids"] + first["output_ids"]
    on = served.tokenizer.encode("on", add_special_tokens=False)
    assert second["prompt_token_ids"] == known + on
    assert second["meta_info"]["session"] == second["meta_info"]["session"] | {"turn": 2, "parent": 1}
    assert generate(served, "on", "c", rid="a", offset=2).json()["prompt_token_ids"] == known[:2] + on
    dropped = generate(served, "on", "d", rid="a", drop_previous_output=True).json()
    assert dropped["prompt_token_ids"] == first["prompt_token_ids"] + on
    samples = call(served, "GET", "/sessions/params").json()["samples"]
    assert samples[0]["token_ids"] == second["prompt_token_ids"] + second["output_ids"]
    assert len(samples) == 3
    assert generate(served, "new", "e", replace=True).status_code == 200
    assert len(call(served, "GET", "/sessions/params").json()["samples"]) == 1
    refused = generate(served, "on", "f", rid="a")
    assert (refused.status_code, "no turn 'a'" in refused.text) == (400, True)
    refused = generate(served, ["on", "and"], ["f", "g"], rid="e")
    assert (refused.status_code, "one prompt" in refused.text) == (400, True)


def test_a_streaming_session_goes_on_by_itself(served):
    body = {"session_id": "flow", "capacity_of_str_len": 0, "streaming": True}
    call(served, "POST", "/open_session", json=body)
    first, second = (generate(served, text, text, "flow").json() for text in ("Go", "on"))
    known = first["prompt_token_ids"] + first["output_ids"]
    assert second["prompt_token_ids"][: len(known)] == known
    assert generate(served, "on", "x", "flow", offset=1).status_code == 400


def test_a_text_client_has_sessions(served):
    with TextClient(served.engine.endpoint, served.tokenizer) as client:
        said, before = messages("Go"), []
        for turn in range(1, 4):
            answer = client.chat(said, {"max_new_tokens": 8, "ignore_eos": True}, session="own")
            assert answer.sample.prompt_ids[: len(before)] == before
            assert (answer.session["turn"], answer.session["branch"]) == (turn, None)
            before = answer.sample.prompt_ids + answer.sample.output.output_ids
            said = [*said, answer.message, *messages("on")]
        (sample,) = client.sessions.export("own")["samples"]
        assert sample["token_ids"] == before
        assert client.finish("own")
        with pytest.raises(SessionGone):
            client.chat(said, session="own")


def test_a_call_without_a_session_has_none(served):
    answer = chat(served, messages("Go"), None)
    assert not hasattr(answer.choices[0], "session")
