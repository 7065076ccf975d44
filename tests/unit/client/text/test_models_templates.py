"""Sessions with the chat templates that models are published with: every turn has the ids before it."""

import random
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.chat_shapes import Talk, chat_prompts, make_backend, sample
from support.lanes import every
from tokenizers import AddedToken

from caesura.client.text.sessions import SessionStore
from caesura.client.text.tokenizer import TextTokenizer

TRL = find_spec("trl")
ALL = ("deepseek_r1_distill", "gemma4", "gemma4_v5", "glm4moe", "lfm2_2_5", "llama3", "nemotron_3_super")
ALL += ("deepseekv3", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_8")
ONE_CALL = ("gptoss", "llama3_1")
NO_TOOLS = ("cohere", "gemma3", "phi3")


def talk_of(name: str, tokenizer: TextTokenizer, seed: int) -> Talk:
    """Return a conversation that the template can show."""
    share = 0.0 if name in NO_TOOLS else 0.5
    shape = "llama" if name in ONE_CALL else name
    return Talk(tokenizer, shape, random.Random(seed), calls=share, system=share)


MARK = re.compile(
    r"<\|[^|<>\s]{1,40}\|?>|<[^|<>\s]{1,40}\|>|<｜[^<>\s]{1,40}｜>|</?s>|<(?:start|end)_of_turn>|<[be]os>"
)


def tokenizer_of(name: str) -> TextTokenizer:
    """Return a tokenizer in which the template's marks are special."""
    assert TRL is not None
    assert TRL.origin is not None
    source = (Path(TRL.origin).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    backend = make_backend()
    marks = sorted(set(MARK.findall(source)))
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return TextTokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, {"default": source})


@pytest.mark.skipif(TRL is None, reason="models' chat templates come with trl")
@pytest.mark.parametrize("traces", [3, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", every(ALL + ONE_CALL + NO_TOOLS, 2))
def test_every_turn_extends_the_ids_before_it(name, traces):
    tokenizer, store = tokenizer_of(name), SessionStore()
    for seed in range(traces):
        talk, ids = talk_of(name, tokenizer, seed), []
        for number in range(1, 5):
            talk.ask()
            turn = store.turn(str(seed), talk.messages, chat_prompts(tokenizer))
            assert (turn.branch, turn.reused) == (None, len(ids)), (seed, number)
            assert turn.prompt_ids[: len(ids)] == ids
            message, output, closed = talk.answer()
            store.record(turn, sample(turn, output, closed=closed), message)
            talk.messages.append(talk.as_returned(message))
            ids = turn.prompt_ids + output
        (exported,) = store.export(str(seed))["samples"]
        assert exported["token_ids"] == ids
