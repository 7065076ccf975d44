"""One engine behind the OpenAI surface, on a real socket."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import openai
import uvicorn
from support.checkpoints import make_checkpoint
from support.tokenizers import make_byte_level
from support.waiting import eventually

from caesura.client import AsyncSchedulerClient, SchedulerClient, launch_scheduler
from caesura.client.serve.app import FrontEnd, ServeOptions, create_app
from caesura.client.serve.pages.metrics import Metrics
from caesura.client.text.tokenizer import TextTokenizer
from caesura.client.text.tokenizer_manager import TokenizerManager

NAME = "tiny/qwen"
"""With a slash, as folders and hub names have."""
TEMPLATE = (
    "{{ bos_token }}{% if tools %}[tools {{ tools | length }}]{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>"
    "{% for call in message.tool_calls %}({{ call.function.arguments.city }}){% endfor %}{% endfor %}"
    "{% if mood %}[{{ mood }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT = 512
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

    def asyncio_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="secret", max_retries=0)


class Door(threading.Thread):
    """The front end on an event loop of its own."""

    def __init__(self, endpoint: str, options: ServeOptions, tokenizer: TextTokenizer) -> None:
        super().__init__(daemon=True)
        self._endpoint = endpoint
        self._options = options
        self._tokenizer = tokenizer
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._server: uvicorn.Server | None = None
        self._up = threading.Event()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        async with AsyncSchedulerClient(self._endpoint) as client:
            manager = TokenizerManager(client, self._tokenizer)
            app = create_app(FrontEnd(manager=manager, options=self._options, metrics=Metrics()))
            config = uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False)
            self._server = uvicorn.Server(config)
            self._up.set()
            await self._server.serve(sockets=[self._listener])

    def __enter__(self) -> Self:
        self.start()
        while not self._up.wait(0.1):
            assert self.is_alive()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self.join()
        self._listener.close()


@contextmanager
def serve_openai(path: Path) -> Iterator[Served]:
    """A model in ``path``, its engine and the server in front."""
    make_byte_level(path, vocab_size=VOCABULARY, chat_template=TEMPLATE)
    make_checkpoint(
        path,
        "qwen3-moe",
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=1,
        max_position_embeddings=CONTEXT,
        seed=5,
    )
    options = ServeOptions(
        api_key="secret", served_model_name=NAME, model_path=str(path), context_length=CONTEXT, max_batch=16
    )
    tokenizer = TextTokenizer.from_folder(path)
    with (
        launch_scheduler(
            path, dtype="float32", device="cpu", num_threads=1, kv_pool_tokens=8192, log_level="WARNING"
        ) as engine,
        Door(engine.endpoint, options, tokenizer) as door,
        openai.OpenAI(base_url=f"{door.url}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield Served(door.url, path, engine, tokenizer, client)


GREEDY = {"model": NAME, "temperature": 0.0, "extra_body": {"ignore_eos": True}}


def with_ids(**extra: object) -> dict[str, object]:
    return {**GREEDY, "extra_body": {"ignore_eos": True, "return_token_ids": True, **extra}}


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def wait_until_idle(served: Served) -> None:
    """Until the engine has nothing to do; paused, it never has by itself."""
    eventually(lambda: live(served) == 0)


def live(served: Served) -> int:
    status = served.engine.status()
    return status.running_requests + status.waiting_requests + status.prefilling_requests
