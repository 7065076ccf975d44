"""prime-rl's own client of token ids (the package ``renderers``) against ``/inference/v1/generate``."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import openai
import pytest
from support.openai_server import NAME, Served, serve_openai

from caesura.client import SamplingParams

client = pytest.importorskip("renderers.client")

pytestmark = pytest.mark.slow
PROMPT = [5, 6, 7, 8]


class Renderer:
    """Renderer of prompts that are ids already."""

    supports_tools = True

    def get_stop_token_ids(self):
        return [1]

    def parse_response(self, ids, **_):
        return SimpleNamespace(
            content=str(ids), reasoning_content=None, tool_calls=[], reasoning_complete=None
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    with serve_openai(tmp_path_factory.mktemp("models") / "tiny") as served:
        yield served


def rollout(url, prompt=PROMPT, **options):
    async def one():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as sender:
            return await client.generate(
                client=sender, renderer=Renderer(), messages=[], model=NAME, prompt_ids=prompt, **options
            )

    return asyncio.run(one())


def test_a_rollout_is_the_engines(served, recorded):
    sampling = {"max_tokens": 20, "temperature": 1.0, "top_p": 1.0, "seed": 5, "return_routed_experts": True}
    found = rollout(
        recorded("prime-rl, renderers", "renderers", served.url),
        sampling_params=sampling,
        cache_salt="3",
        priority=2,
    )
    params = SamplingParams(max_new_tokens=20, seed=5, stop_token_ids=(1,))
    expected = served.engine.generate(PROMPT, sampling_params=params, return_logprob=True)
    assert found["completion_ids"] == list(expected.output_ids)
    assert found["completion_logprobs"] == pytest.approx(expected.output_logprobs, abs=1e-5)
    assert found["finish_reason"] == expected.finish_reason.type
    assert found["usage"]["completion_tokens"] == len(expected.output_ids)
    assert found["routed_experts"]["shape"][0] == len(PROMPT) + len(expected.output_ids) - 1
    assert found["routed_experts"]["data"]


def test_a_prompt_that_is_too_long_is_not_even_sent(served):
    with pytest.raises(client.OverlongPromptError):
        rollout(served.url, prompt=[5] * 600)
