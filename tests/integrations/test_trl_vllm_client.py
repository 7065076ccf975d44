"""TRL's own client of ``vllm serve`` against the server: generation, chats and the scores of a teacher."""

import importlib.machinery
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from support.http_server import listening
from support.openai_server import CONTEXT, Served, serve_openai
from support.recorded_routes import Recorded

from caesura.client import SamplingParams

pytest.importorskip("trl", reason="trl comes with the extra `trl`")
vllm_client = pytest.importorskip("trl.generation.vllm_client")

pytestmark = pytest.mark.filterwarnings("default")  # TRL and its libraries warn of one another
CHAT = [
    [{"role": "user", "content": "once"}],
    [{"role": "user", "content": [{"type": "text", "text": "upon"}, {"type": "text", "text": "a time"}]}],
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_openai(tmp_path_factory.mktemp("models") / "tiny") as served:
        yield served


@pytest.fixture(scope="module")
def url(served: Served) -> Iterator[str]:
    """TRL's client sends no key; it asks whether vLLM is installed, and imports nothing of it to generate."""
    package = types.ModuleType("vllm")
    package.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    package.__version__ = "0.31.0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", package)
        with listening(
            endpoint=served.engine.endpoint, tokenizer=served.tokenizer, context_length=CONTEXT, max_batch=16
        ) as door:
            yield door.url


@pytest.fixture
def client(url: str, recorded: Recorded) -> Any:
    return vllm_client.VLLMClient(base_url=recorded("TRL", "trl", url))


def test_generate(served, client):
    prompts = [[5, 6, 7], [8, 9]]
    found = client.generate(
        prompts, n=2, max_tokens=6, generation_kwargs={"seed": 3, "ignore_eos": True}, logprobs=2
    )
    params = SamplingParams(n=2, max_new_tokens=6, seed=3, ignore_eos=True)
    expected = [
        output
        for outputs in served.engine.generate(
            prompts, sampling_params=params, return_logprob=True, top_logprobs_num=2
        )
        for output in (outputs if isinstance(outputs, list) else [outputs])
    ]
    assert found["prompt_ids"] == prompts
    assert found["completion_ids"] == [list(output.output_ids) for output in expected]
    for output, logprobs, ids in zip(expected, found["logprobs"], found["logprob_token_ids"], strict=True):
        for position, (values, tokens) in enumerate(zip(logprobs, ids, strict=True)):
            wanted = {id: value for value, id in output.output_top_logprobs.at(position)}
            wanted[output.output_ids[position]] = output.output_logprobs[position]
            assert dict(zip(tokens, values, strict=True)) == pytest.approx(wanted, abs=1e-5)
            assert values == sorted(values, reverse=True)


def test_the_sampled_token_alone_has_a_logprob_by_default(client):
    found = client.generate(["once upon", "a time"], max_tokens=4, temperature=0.0)
    assert found["logprob_token_ids"] == [[[id] for id in ids] for ids in found["completion_ids"]]
    assert [len(logprobs) for logprobs in found["logprobs"]] == [4, 4]


def test_chat(served, client):
    def city(name: str) -> str:
        """
        Return the city's country.

        Args:
            name: the city
        """
        return "France"

    found = client.chat(CHAT, n=2, max_tokens=4, tools=[city], generation_kwargs={"ignore_eos": True})
    texts = [served.tokenizer.decode(ids, skip_special_tokens=False) for ids in found["prompt_ids"]]
    assert texts == ["<s>[tools 1]<user>once</><assistant>", "<s>[tools 1]<user>upon\na time</><assistant>"]
    assert [len(ids) for ids in found["completion_ids"]] == [4] * 4
    assert [len(logprobs) for logprobs in found["logprobs"]] == [4] * 4


def test_chat_with_a_template_of_the_trainer(served, client):
    template = "{% for message in messages %}{{ mark }}{{ message.content }}{% endfor %}"
    found = client.chat(CHAT[:1], chat_template=template, chat_template_kwargs={"mark": "Q: "}, max_tokens=1)
    assert served.tokenizer.decode(found["prompt_ids"][0]) == "Q: once"


@pytest.mark.parametrize("chunk_size", [0, 1])
def test_scores_of_a_teacher(served, client, chunk_size):
    sequences, lengths, count = [[5, 6, 7, 8, 9], [11, 12, 13]], [2, 1], 3
    found = client.get_sequence_logprobs(sequences, lengths, top_logprobs=count, chunk_size=chunk_size)
    for position, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        scored = served.engine.generate(
            sequence,
            sampling_params=SamplingParams(max_new_tokens=1),
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=count,
        )
        rows = [scored.input_top_logprobs.at(at) for at in range(length - 1, len(sequence) - 1)]
        assert found["logprob_token_ids"][position] == [[id for _, id in row] for row in rows]
        assert found["logprobs"][position] == [pytest.approx([lp for lp, _ in row], abs=1e-5) for row in rows]
        actual = [[logprob] for logprob in scored.input_logprobs[length:]]
        assert found["actual_logprobs"][position] == [pytest.approx(each, abs=1e-5) for each in actual]
        assert found["actual_token_ids"][position] == [[token] for token in sequence[length:]]


def test_patterns(served, client):
    found = client.generate([[5, 6, 7]], n=3, structured_outputs_regex="(a|bc){3}")
    for ids in found["completion_ids"]:
        assert re.fullmatch("(a|bc){3}", served.tokenizer.decode(ids))
