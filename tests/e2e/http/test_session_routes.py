"""Sessions of a real engine: exact ids over pauses and updates, branches, training samples, ends."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from support.openai_server import NAME, Served, messages, serve_openai


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_openai(tmp_path_factory.mktemp("models") / "tiny") as served:
        yield served


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


def test_a_call_without_a_session_has_none(served):
    answer = chat(served, messages("Go"), None)
    assert not hasattr(answer.choices[0], "session")
