"""Sessions: ids of every turn are those that were sampled, whatever the template does with them."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.chat_shapes import REWRITES_HISTORY, TEMPLATES, TOOLS, Talk, chat_prompts, make_backend, sample

from caesura.client.exceptions import InvalidRequest, SessionGone
from caesura.client.text.sessions import Kept, SessionStore
from caesura.client.text.tokenizer import TextTokenizer

TRACES = 12  # `pytest -m long` has a thousand


@pytest.fixture(scope="module")
def backend():
    return make_backend()


@pytest.fixture(scope="module")
def tokenizers(backend):
    return {name: TextTokenizer(backend, {}, {"default": text}) for name, text in TEMPLATES.items()}


@pytest.fixture
def tokenizer(tokenizers):
    return tokenizers["qwen"]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def say(store, tokenizer, messages, text="Stop!", *, session="s", index=0, tools=TOOLS, ended=True, **more):
    """Run one turn that is answered with ``text``; return it, its node and the conversation."""
    turn = store.turn(session, messages, chat_prompts(tokenizer, tools, **more))
    end = tokenizer.backend.token_to_id("<|im_end|>")
    ids = tokenizer.encode(text, add_special_tokens=False) + [end] * ended
    answer = {"role": "assistant", "content": text}
    node = store.record(turn, sample(turn, ids, closed=end if ended else None, index=index), answer)
    return turn, node, [*messages, answer]


def asked(*texts):
    return [{"role": "user", "content": text} for text in texts]


@pytest.mark.parametrize("traces", [TRACES, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("shape", TEMPLATES)
def test_every_turn_extends_the_ids_before_it(tokenizers, shape, traces):
    tokenizer, store = tokenizers[shape], SessionStore()
    for seed in range(traces):
        talk, ids = Talk(tokenizer, shape, random.Random(seed)), []
        for number in range(1, 5):
            talk.ask()
            turn = store.turn(str(seed), talk.messages, chat_prompts(tokenizer))
            assert turn.branch is None, (shape, seed, number)
            assert turn.prompt_ids[: len(ids)] == ids
            assert turn.reused == len(ids)
            if shape not in REWRITES_HISTORY and not (
                shape == "glm" and ids and ids[-1] in tokenizer.skipped
            ):
                shown = tokenizer.decode(turn.prompt_ids, skip_special_tokens=False)
                assert shown == talk.text(talk.messages, True), (seed, number)
            new = tokenizer.decode(turn.prompt_ids[len(ids) :], skip_special_tokens=False)
            assert all(
                each["content"] in new or shape in ("mistral", "harmony") for each in talk.messages[-1:]
            )
            message, output, closed = talk.answer()
            store.record(turn, sample(turn, output, closed=closed), message)
            talk.messages.append(talk.as_returned(message))
            ids = turn.prompt_ids + output
        (exported,) = store.export(str(seed))["samples"]
        assert exported["token_ids"] == ids


def test_a_generation_that_ended_by_length_gets_its_end(tokenizer):
    store = SessionStore()
    _, node, messages = say(store, tokenizer, asked("Go"), "The quick", ended=False)
    turn, _, _ = say(store, tokenizer, [*messages, *asked("on")])
    assert turn.prompt_ids[: node.length] == node.ids()
    new = tokenizer.decode(turn.prompt_ids[node.length :], skip_special_tokens=False)
    assert new == "<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"


def test_branches_say_why(tokenizer):
    store = SessionStore()
    first, root, one = say(store, tokenizer, asked("Go"))
    assert (first.branch, root.branch, root.turn) == (None, None, 1)
    second, _, two = say(store, tokenizer, [*one, *asked("on")])
    assert second.branch is None
    again, node, _ = say(store, tokenizer, [*one, *asked("on")], "Other")
    assert (again.branch, again.parent, node.turn) == ("sibling", root, 3)
    changed = [*two[:-1], {"role": "assistant", "content": "edited"}, *asked("more")]
    turn, _, _ = say(store, tokenizer, changed)
    assert (turn.branch, turn.parent) == ("history_changed", root)
    turn, _, _ = say(store, tokenizer, [*two, *asked("more")], tools=None)
    assert (turn.branch, turn.parent) == ("tools_changed", None)
    turn, _, _ = say(store, tokenizer, asked("Begin"))
    assert (turn.branch, turn.parent) == ("new_root", None)
    turn, _, _ = say(store, tokenizer, asked("Go"))
    assert turn.branch == "sibling"
    turn, _, _ = say(store, tokenizer, two, continued=True)
    assert turn.branch == "continued"


def test_turns_that_run_together_are_siblings(tokenizer):
    store = SessionStore()
    _, root, one = say(store, tokenizer, asked("Go"))
    turns = [store.turn("s", [*one, *asked("on")], chat_prompts(tokenizer)) for _ in range(2)]
    nodes = [
        store.record(
            turn, sample(turn, [5, 6 + at], index=index), {"role": "assistant", "content": f"{at}{index}"}
        )
        for at, turn in enumerate(turns)
        for index in range(2)
    ]
    assert [node.branch for node in nodes] == [None, None, "sibling", "sibling"]
    assert {node.parent for node in nodes} == {root}
    samples = store.export("s")["samples"]
    assert [each["shared_tokens"] for each in samples] == [0] + [root.length] * 3


def test_a_template_that_drops_messages_branches(backend):
    last_only = (
        "{% for m in messages[-2:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    tokenizer = TextTokenizer(backend, {}, {"default": last_only})
    store = SessionStore()
    _, _, one = say(store, tokenizer, asked("Go"))
    turn, _, two = say(store, tokenizer, [*one, *asked("on")], "yes")
    assert (turn.branch, turn.parent) == ("template", None)
    assert tokenizer.decode(turn.prompt_ids, skip_special_tokens=False) == tokenizer.render_chat(two[:-1])


def test_a_cut_answer_is_continued_with_its_own_ids(tokenizer):
    store = SessionStore()
    _, node, one = say(store, tokenizer, asked("Go"), "The quick", ended=False)
    turn, longer, _ = say(store, tokenizer, one, " fox", continued=True)
    assert (turn.prompt_ids, turn.branch, longer.parent) == (node.ids(), None, node)
    after, _, _ = say(
        store, tokenizer, [*asked("Go"), {"role": "assistant", "content": "The quick fox"}, *asked("on")]
    )
    assert after.prompt_ids[: longer.length] == longer.ids()


def test_a_history_is_found_however_it_is_spelt(tokenizer):
    store = SessionStore()
    turn = store.turn("s", asked("Go"), chat_prompts(tokenizer))
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"x": 1, "y": [2]}'}}
    said = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    node = store.record(turn, sample(turn, [5]), said)
    other = {"id": "b", "index": 0, "function": {"arguments": {"y": [2], "x": 1}, "name": "look"}}
    passed_on = {"role": "assistant", "content": " ", "refusal": None, "tool_calls": [other]}
    question = {"role": "user", "content": [{"type": "text", "text": "Go"}]}
    answer = {"role": "tool", "content": "42", "tool_call_id": "b"}
    again = store.turn("s", [question, passed_on, answer], chat_prompts(tokenizer))
    assert (again.parent, again.prompt_ids[: node.length]) == (node, node.ids())


def test_the_export_is_a_training_sample(tokenizer):
    store = SessionStore()
    first, root, one = say(store, tokenizer, asked("Go"))
    second, _, _ = say(store, tokenizer, [*one, *asked("on")], "no")
    exported = store.export("s")
    (got,) = exported["samples"]
    assert got["token_ids"][: len(second.prompt_ids)] == second.prompt_ids
    sampled = [token for token, mask in zip(got["token_ids"], got["mask"], strict=True) if mask]
    assert sampled == [*root.output_ids, *got["token_ids"][len(second.prompt_ids) :]]
    assert [(each["start"], each["end"]) for each in got["weight_versions"]] == [
        (each["start"], each["end"]) for each in got["turns"]
    ]
    start = len(first.prompt_ids)
    assert got["logprobs"][start : start + 2] == [0.0, -1.0]
    assert len(got["logprobs"]) == len(got["token_ids"])


def test_sessions_expire_and_say_so(tokenizer, clock):
    store = SessionStore(lease_s=10, clock=clock)
    turn, _, _ = say(store, tokenizer, asked("Go"))
    assert turn.lease()["prefix_lease_s"] == 10
    clock.now = 9
    say(store, tokenizer, asked("Go"), session="other")
    clock.now = 11
    with pytest.raises(SessionGone, match="lease has expired"):
        store.turn("s", asked("Go"), chat_prompts(tokenizer))
    assert store.ids() == ["other"]
    assert store.take_ended() == [store.lease_name("s")]
    assert store.open("s", lease_s=1) == "s"
    with pytest.raises(InvalidRequest, match="is open"):
        store.open("s")
    assert store.finish("s")
    assert not store.finish("s")
    with pytest.raises(SessionGone, match="finished"):
        store.export("s")


def test_memory_is_bounded_by_sessions_and_tokens(tokenizer):
    store = SessionStore(max_sessions=3, max_tokens=1500)
    for number in range(20):
        say(store, tokenizer, asked("Go"), session=str(number))
    assert store.ids() == ["17", "18", "19"]
    with pytest.raises(SessionGone, match="room for others"):
        store.turn("16", asked("Go"), chat_prompts(tokenizer))
    turn, _, _ = say(store, tokenizer, asked("Go"), "no " * 1500, session="19")
    assert store.usage() == (0, 0)
    with pytest.raises(SessionGone, match="it alone"):
        store.export("19")
    assert store.record(turn, sample(turn, [5]), {"role": "assistant", "content": "late"}) is None


def test_a_shown_turn_leaves_its_session_as_it_is(tokenizer):
    store = SessionStore()
    shown = store.turn("s", asked("Go"), chat_prompts(tokenizer), counts=False)
    assert (shown.number, store.ids()) == (1, [])
    assert store.record(shown, sample(shown, [5]), {"role": "assistant", "content": "no"}) is None
    first, _, one = say(store, tokenizer, asked("Go"))
    assert first.number == 1
    shown = store.turn("s", [*one, *asked("on")], chat_prompts(tokenizer), counts=False)
    second, _, _ = say(store, tokenizer, [*one, *asked("on")])
    assert (second.number, second.prompt_ids) == (2, shown.prompt_ids)
    store.finish("s")
    with pytest.raises(SessionGone):
        store.turn("s", asked("Go"), chat_prompts(tokenizer), counts=False)


def test_of_equal_answers_the_named_one_goes_on(tokenizer):
    store = SessionStore()
    _, first, one = say(store, tokenizer, asked("Go"))
    say(store, tokenizer, asked("Go"))
    turn = store.turn("s", [*one, *asked("on")], chat_prompts(tokenizer), after=first)
    assert turn.parent is first


def test_kept_answers_end_with_their_session(tokenizer):
    store = SessionStore(max_sessions=2, max_tokens=3000)
    for name in "abc":
        _, node, _ = say(store, tokenizer, asked("Go"), session=name)
        store.keep((b"me", name), Kept(store, name, node, b"x"))
        store.keep((b"me", name), Kept(store, name, node, b"in its place"))
        assert store.kept((b"me", name)).body == b"x"
    assert store.kept((b"me", "a")) is None
    assert store.kept((b"you", "c")) is None
    used = store.usage()[1]
    store.keep((b"me", "big"), Kept(store, "c", node, b"x" * 8 * 600))
    assert store.usage()[1] >= used + 600
    assert not store.forget((b"me", "big"))
    assert store.usage()[1] == used
    assert store.forget((b"me", "c"))
    assert not store.forget((b"me", "c"))
    _, node, _ = say(store, tokenizer, asked("Go"), session="b")
    store.keep((b"me", "huge"), Kept(store, "b", node, b"x" * 8 * 3000))
    assert (store.usage(), store.kept((b"me", "huge"))) == ((0, 0), None)


def test_a_turn_that_outlives_its_session_is_told_of(tokenizer):
    store = SessionStore()
    turn = store.turn("s", asked("Go"), chat_prompts(tokenizer))
    name = turn.lease()["prefix_lease"]
    store.finish("s")
    assert store.take_ended() == [name]
    store.record(turn, sample(turn, [5]), {"role": "assistant", "content": "late"})
    assert store.take_ended() == [name]


def test_a_continued_answer_stands_once_in_the_messages(tokenizer):
    store = SessionStore()
    _, _, one = say(store, tokenizer, asked("Go"), "The quick", ended=False)
    say(store, tokenizer, one, " fox", continued=True)
    (got,) = store.export("s")["samples"]
    assert [each["content"] for each in got["messages"]] == ["Go", "The quick fox"]


def appended(store, rid, ids, output=(7, 8), **more):
    turn = store.append("s", rid, lambda later: [*ids], **more)
    return turn, store.record(turn, sample(turn, [*output]), {})


def test_turns_of_token_ids_follow_the_request_they_name():
    store = SessionStore()
    with pytest.raises(SessionGone):
        appended(store, "a", [1])
    store.open("s")
    appended(store, "a", [1, 2])
    turn, node = appended(store, "b", [3], after="a")
    assert (turn.prompt_ids, turn.parent.turn, node.branch) == ([1, 2, 7, 8, 3], 1, None)
    turn, node = appended(store, "c", [4], after="b", drop_previous_output=True)
    assert (turn.prompt_ids, turn.parent.turn, node.branch) == ([1, 2, 7, 8, 3, 4], 1, "sibling")
    turn, node = appended(store, "d", [5], after="b", offset=1)
    assert (turn.prompt_ids, turn.parent, node.branch) == ([1, 5], None, "new_root")
    with pytest.raises(InvalidRequest, match="no turn 'x'"):
        appended(store, "e", [5], after="x")
    assert len(store.export("s")["samples"]) == 3
    _, node = appended(store, "f", [6], after="a", replace=True)
    assert [each["turns"][-1]["turn"] for each in store.export("s")["samples"]] == [4, node.turn]
    with pytest.raises(InvalidRequest, match="no turn 'b'"):
        appended(store, "g", [5], after="b")
    appended(store, "h", [9], replace=True)
    (got,) = store.export("s")["samples"]
    assert (got["token_ids"], store.usage()[1]) == ([9, 7, 8], store.export("s")["tokens"])


def test_a_streaming_session_is_appended_to():
    store = SessionStore()
    store.open("s", streaming=True)
    appended(store, "a", [1])
    turn, _ = appended(store, "b", [2])
    assert turn.prompt_ids == [1, 7, 8, 2]
    with pytest.raises(InvalidRequest, match="only appended to"):
        appended(store, "c", [2], offset=1)


def test_threads_share_a_store(tokenizer):
    store = SessionStore()

    def talk(number):
        messages, parents = [], []
        for turn in range(6):
            said, _, messages = say(store, tokenizer, [*messages, *asked(f"{turn}")], session=str(number % 2))
            parents.append(said.parent)
        return parents

    with ThreadPoolExecutor(4) as threads:
        for first, *others in threads.map(talk, range(4)):
            assert first is None
            assert None not in others
    assert sum(store.export(name)["turns"] for name in store.ids()) == 24
