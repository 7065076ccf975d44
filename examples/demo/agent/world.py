"""The task: a word's number, which only the tool knows; its chat template and tokenizer, and the rewards.

Invariants: a number is a function of the word alone, which no policy can learn. What the template writes of a
turn is, token by token, what the policy sampled.
"""

import hashlib
import json
import random
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from .. import task

DIGITS: Final = 4
TOOL: Final = "look_up"
TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Return the number of a word.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}},
                "required": ["word"],
            },
        },
    }
]
SPECIAL: Final = ("<|end|>", "<|user|>", "<|assistant|>", "<|tool|>")
MARKS: Final = ("<tool_call>", f'{{"name": "{TOOL}", "arguments": {{"word": "', '"}}', "</tool_call>")
"""Parts of a call, a token each, so that few of them make one."""
CHARACTERS: Final = ("\0", *task.ALPHABET, *"0123456789 ?")
VOCAB_SIZE: Final = len(CHARACTERS) + len(SPECIAL) + len(MARKS)
END: Final = len(CHARACTERS)
CONTEXT_LEN: Final = 96
MAX_NEW_TOKENS: Final = 16
MAX_TURNS: Final = 3
CALL_REWARD: Final = 0.2
"""Reward of a call with the right word; the rest is for the answer."""
TEMPLATE: Final = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] -%}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{%- endfor -%}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def build_tokenizer() -> Tokenizer:
    """Return a tokenizer of characters, marks and special tokens."""
    tokenizer = Tokenizer(
        models.WordLevel({text: index for index, text in enumerate(CHARACTERS)}, unk_token=CHARACTERS[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer and the chat template into a model's folder."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def number_of(word: str) -> str:
    """Return the number that the tool knows."""
    digest = hashlib.blake2b(f"number of {word}".encode(), digest_size=4).digest()
    return f"{int.from_bytes(digest, 'big') % 10**DIGITS:0{DIGITS}}"


def demonstration(word: str, rng: random.Random, calls: float) -> tuple[list[tuple[str, bool]], bool]:
    """Return the parts of a chat, each with True if the policy says it; and True if it calls the tool."""
    question = (f"<|user|>{word}<|end|><|assistant|>", False)
    if rng.random() >= calls:
        return [question, (f"{rng.randrange(10**DIGITS):0{DIGITS}}<|end|>", True)], False
    number = number_of(word)
    mark, head, tail, end = MARKS
    return [
        question,
        (f"{mark}{head}{word}{tail}{end}<|end|>", True),
        (f"<|tool|>{number}<|end|><|assistant|>", False),
        (f"{number}<|end|>", True),
    ], True


def answer_reward(word: str, answer: str) -> float:
    """Return the share of the number's digits that are right up to the first wrong one, in what is left."""
    number = number_of(word)
    right = next(
        (place for place, digit in enumerate(number) if answer[place : place + 1] != digit), len(number)
    )
    whole = (right + (answer == number)) / (len(number) + 1)
    return (1 - CALL_REWARD) * whole
