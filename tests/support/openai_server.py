"""One engine behind the OpenAI surface, on a real socket."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
from support.checkpoints import make_checkpoint
from support.http_server import listening
from support.tokenizers import make_byte_level

from caesura.client import SchedulerClient, launch_scheduler
from caesura.client.text.tokenizer import TextTokenizer

NAME = "tiny/qwen"
"""Name of the model, with a slash as folders and hub names have."""
TEMPLATE = (
    "{{ bos_token }}{% if tools %}[tools {{ tools | length }}]{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>"
    "{% for call in message.tool_calls %}({{ call.function.arguments.city }}){% endfor %}{% endfor %}"
    "{% if mood %}[{{ mood }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT = 512
ENGINE = {"dtype": "float32", "device": "cpu", "num_threads": 1, "kv_pool_tokens": 8192}
VOCABULARY = 360
"""Fewer than the tokenizer's: its last ids are never sampled."""


@dataclass
class Served:
    """One engine and one server for the module."""

    url: str
    path: Path
    engine: SchedulerClient
    tokenizer: TextTokenizer
    client: openai.OpenAI


@contextmanager
def serve_openai(path: Path) -> Iterator[Served]:
    """Serve a model in ``path``: its engine, and the server in front."""
    make_byte_level(path, vocab_size=VOCABULARY, chat_template=TEMPLATE)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    make_checkpoint(path, "qwen3-moe", bos_token_id=0, eos_token_id=1, seed=5, **sizes)
    options = {"api_key": "secret", "served_model_name": NAME, "model_path": str(path), "max_batch": 16}
    options["context_length"] = CONTEXT
    tokenizer = TextTokenizer.from_folder(path)
    with (
        launch_scheduler(path, log_level="WARNING", **ENGINE) as engine,
        listening(endpoint=engine.endpoint, connect_timeout=None, tokenizer=tokenizer, **options) as door,
        openai.OpenAI(base_url=f"{door.url}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield Served(door.url, path, engine, tokenizer, client)


GREEDY = {"model": NAME, "temperature": 0.0, "extra_body": {"ignore_eos": True}}


def with_ids(**extra: object) -> dict[str, object]:
    return {**GREEDY, "extra_body": {"ignore_eos": True, "return_token_ids": True, **extra}}


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
