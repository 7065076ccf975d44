"""A model whose answers are known: each token is followed by one other, whatever comes before it.

Its layers add nothing to the embedding, and a row of the head is the embedding of the token before. Whole
words are tokens, so an answer takes few steps. The template begins an answer with ``<|ask|>`` where tools
are there and no result has come yet, and with ``<|tell|>`` elsewhere.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint
from support.tokenizers import make_byte_level
from tokenizers import AddedToken, Tokenizer

ASK = ("<think>", "I need", " the weather.", "</think>", "\n", "<tool_call>")
CALL = ('\n{"name": "get_weather", ', '"arguments": {"city": "Paris"}}\n', "</tool_call>", "<|im_end|>")
TELL = ("It is ", "18 degrees ", "in Paris.", "<|im_end|>")
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}{% for message in messages %}{% if message.role != 'assistant' %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% else %}{{ '<|ask|>' if message.tool_calls else '<|tell|>' }}\
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content }}{% for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}\
{{ '<|ask|>' if tools and messages[-1].role != 'tool' else '<|tell|>' }}{% endif %}"""
QUESTION = "What is the weather in Paris?"
ANSWER = "It is 18 degrees in Paris."
THOUGHT = "I need the weather."
ARGUMENTS = '{"city": "Paris"}'
HIDDEN = 64


def make_steered_model(path: Path) -> Path:
    make_byte_level(path, vocab_size=360, chat_template=TEMPLATE, eos_token="<|im_end|>")
    file = path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    special = ["<|ask|>", "<|tell|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
    words = [word for word in (*special, *ASK, *CALL, *TELL) if tokenizer.token_to_id(word) is None]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in dict.fromkeys(words)])
    tokenizer.save(str(file))
    size = tokenizer.get_vocab_size()
    make_checkpoint(
        path,
        "qwen3",
        vocab_size=size,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
    )
    _steer(path / "model.safetensors", tokenizer, ["<|ask|>", *ASK, *CALL], ["<|tell|>", *TELL])
    return path


def _steer(file: Path, tokenizer: Tokenizer, *answers: Sequence[str]) -> None:
    weights = load_file(file)
    embedding = weights["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(0)
    embedding.copy_(torch.nn.functional.normalize(torch.randn(embedding.shape, generator=generator), dim=1))
    head = weights["lm_head.weight"].zero_()
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
        elif name == "model.norm.weight":
            value.fill_(1.0)
    for answer in answers:
        ids = [tokenizer.token_to_id(word) for word in answer]
        for before, after in pairwise(ids):
            head[after] += 10.0 * embedding[before]
    save_file(weights, file, {"format": "pt"})
