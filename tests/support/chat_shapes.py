"""Chat templates of the shapes that models come with, and conversations in which a model answers by them."""

import json
import random
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from caesura.client.connection.results import GenerateOutput
from caesura.client.text.sessions import ChatPrompts
from caesura.client.text.tokenizer import TextTokenizer
from caesura.client.text.tokenizer_manager import Sample
from caesura.io_struct import FinishReason, WeightVersionSpan

from .tokenizers import LINES

SPECIALS = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_middle|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "<|User|>",
    "<|Assistant|>",
    "<|calls|>",
    "<|call|>",
    "<|/call|>",
    "<|/calls|>",
    "<|outs|>",
    "<|out|>",
    "<|/out|>",
    "<|/outs|>",
    "[INST]",
    "[/INST]",
    "[TOOLS]",
    "[/TOOLS]",
    "[CALLS]",
    "[RESULTS]",
    "[/RESULTS]",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|end|>",
    "<|return|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|system|>",
]
_CALL = (
    "{{ '{\"name\": \"' ~ c.function.name ~ '\", \"arguments\": ' ~ c.function.arguments | tojson ~ '}' }}"
)
TEMPLATES = {
    # tool answers in a row are one user turn
    "qwen": "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>{% if loop.last or "
    "messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% elif m.role == 'assistant' %}"
    "<|im_start|>assistant\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n" + _CALL + "\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # reasoning stays only behind the last question
    "qwen3": "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}\n<tool_response>\n"
    "{{ m.content }}\n</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "<|im_end|>\n"
    "{% endif %}{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last "
    "or m.reasoning_content) %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n" + _CALL + "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # one call, without content
    "llama": "<s>{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}<|head|>assistant<|/head|>\n\n"
    "{% set c = m.tool_calls[0] %}"
    + _CALL + "<|eot|>{% else %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/head|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|head|>assistant"
    "<|/head|>\n\n"
    "{% endif %}",
    # tools before the last question, calls with ids of nine characters
    "mistral": "<s>{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[TOOLS] {{ tools | tojson }}[/TOOLS]{% endif %}[INST] "
    "{{ m.content }}"
    "[/INST]{% elif m.tool_calls %}[CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}" + _CALL + ""
    "{{ ', ' if not loop.last }}{% endfor %}]"
    "</s>{% elif m.role == 'assistant' %} {{ m.content }}</s>{% elif m.role == 'tool' %}[RESULTS] "
    "{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/RESULTS]{% endif %}{% endfor %}",
    # tool answers are opened and closed by their neighbours; no header behind them
    "deepseek": "<s>{% set ns = namespace(out=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if not ns.out %}<|outs|>{% set ns.out = true %}{% endif %}<|out|>{{ m.content }}<|/out|>{% else %}"
    "{% if ns.out %}<|/outs|>{% endif %}{% if m.role == 'user' %}<|User|>{{ m.content }}<|Assistant|>"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% if m.tool_calls %}<|calls|>"
    "{% for c in m.tool_calls %}<|call|>"
    "{{ c.function.name }}\n```json\n{{ c.function.arguments | tojson }}\n```<|/call|>{% endfor %}"
    "<|/calls|>{% endif %}"
    "</s>{% else %}{{ m.content }}{% endif %}{% set ns.out = false %}{% endif %}{% endfor %}"
    "{% if ns.out %}<|/outs|>{% endif %}",
    # the last answer ends otherwise than earlier ones; tool answers name the function
    "harmony": "{% for m in messages %}{% if m.tool_calls %}{% set c = m.tool_calls[0] %}"
    "<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}<|start|>assistant"
    "<|channel|>final"
    "<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% elif m.role == 'tool' %}"
    "<|start|>functions.{{ messages[loop.index0 - 1].tool_calls[0].function.name }} to=assistant"
    "<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    # the next turn's header is the end of an answer
    "glm": "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' "
    "%}<|observation|>{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.role == 'assistant' %}"
    "<|assistant|>\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n"
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% else %}<|{{ m.role }}|>\n"
    "{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    # calls are named by their ids
    "kimi": "{% for m in messages %}<|im_{{ 'user' if m.role == 'user' else 'start' }}|>{{ m.role }}"
    "<|im_middle|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}"
    "<|calls|>{% for c in m.tool_calls %}<|call|>{{ c.id }}<|message|>"
    "{{ c.function.arguments | tojson }}<|/call|>"
    "{% endfor %}<|/calls|>{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant"
    "<|im_middle|>{% endif %}",
    # no special tokens at all
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %} CALL " + _CALL + "{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
}  # fmt: skip
ONE_CALL = ("llama", "harmony")
REWRITES_HISTORY = ("qwen3", "mistral", "harmony")
"""Templates whose earlier turns depend on later ones, so that the text of exact ids differs from theirs."""
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
    }
]


def make_backend() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=list(SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def chat_prompts(tokenizer: TextTokenizer, tools=TOOLS, **more) -> ChatPrompts:
    def render(messages, generation):
        wanted = not more.get("continued") if generation is None else generation
        return tokenizer.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=wanted,
            continue_final_message=bool(more.get("continued")) and generation is None,
        )

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    return ChatPrompts(
        render=render, encode=encode, tokenizer=tokenizer, form=json.dumps(tools).encode(), **more
    )


def sample(turn, ids, *, closed=None, reason="stop", index=0, version="1"):
    span = WeightVersionSpan(version=version, epoch=int(version), start=0, end=len(ids))
    output = GenerateOutput(
        rid="r", index=index, output_ids=ids, output_logprobs=[-float(at) for at in range(len(ids))],
        raw_logprobs=None, sampled_logprobs=None, routed_experts=None,
        finish_reason=FinishReason(type=reason, matched=closed), weight_versions=[span] if ids else [],
        prompt_tokens=len(turn.prompt_ids), cached_tokens=0, seed=0, num_retractions=0, queue_time=0.0,
        e2e_latency=0.0,
    )  # fmt: skip
    return Sample(index=index, rid="r", prompt_ids=turn.prompt_ids, text="", output=output, matched=closed)


@dataclass
class Talk:
    """A conversation of random turns, in the form in which templates take it."""

    tokenizer: TextTokenizer
    shape: str
    random: random.Random
    messages: list[dict] = field(default_factory=list)
    calls: float = 0.5
    """Share of answers with tool calls."""
    system: float = 0.5
    """Share of conversations with a system's message."""

    def words(self) -> str:
        picked = self.random.choice(LINES).split()
        at = self.random.randrange(len(picked))
        return " ".join(picked[at : at + self.random.randint(1, 5)])

    def ask(self) -> None:
        """Add what the environment says next: answers of tools, or a question."""
        calls = self.messages[-1].get("tool_calls") if self.messages else None
        for call in calls or ():
            self.messages.append({"role": "tool", "content": self.words(), "tool_call_id": call["id"]})
        if not calls:
            if not self.messages and self.random.random() < self.system:
                self.messages.append({"role": "system", "content": self.words()})
            self.messages.append({"role": "user", "content": self.words()})

    def answer(self) -> tuple[dict, list[int], int | None]:
        """Return an answer, ids that spell it in some way, and the token that closes it, or None."""
        pick = self.random
        message = {"role": "assistant", "content": self.words()}
        if self.shape == "qwen3":
            message["reasoning_content"] = self.words()
        if pick.random() < self.calls:
            count = 1 if self.shape in ONE_CALL else pick.randint(1, 3)
            message["tool_calls"] = [
                {"id": f"{pick.getrandbits(36):09x}", "type": "function",
                 "function": {"name": pick.choice(["look", "count"]), "arguments": {"at": self.words()}}}
                for _ in range(count)
            ]  # fmt: skip
        text = self.text([*self.messages, message], False).removeprefix(self.text(self.messages, True))
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self.shape == "glm":
            ids.append(
                self.tokenizer.backend.token_to_id(
                    "<|observation|>" if "tool_calls" in message else "<|user|>"
                )
            )
        while ids and ids[-1] not in self.tokenizer.skipped and self.shape != "plain":
            ids.pop()  # what the template writes behind the end
        closed = ids[-1] if ids and ids[-1] in self.tokenizer.skipped else None
        body = self.tokenizer.decode(ids[:-1] if closed is not None else ids, skip_special_tokens=False)
        if pick.random() < 0.7:  # as a sampler does, and no tokenizer
            cuts = sorted(pick.sample(range(len(body) + 1), min(4, len(body))))
            parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
            odd = [token for part in parts for token in self.tokenizer.encode(part, add_special_tokens=False)]
            if self.tokenizer.decode(odd, skip_special_tokens=False) == body:
                ids = [*odd, *([] if closed is None else [closed])]
        if closed is not None and pick.random() < 0.2:  # ended by its length
            ids, closed = ids[:-1], None
        return message, ids, closed

    def text(self, messages, generation) -> str:
        return self.tokenizer.render_chat(messages, tools=TOOLS, add_generation_prompt=generation)

    def as_returned(self, message: dict) -> dict:
        """Return an answer as a client's library might pass it on."""
        pick = self.random
        found = dict(message, refusal=None, audio=None, annotations=[])
        if pick.random() < 0.7:
            found.pop("reasoning_content", None)
        if calls := found.get("tool_calls"):
            found["tool_calls"] = [{**call, "index": 0, "function": {**call["function"]}} for call in calls]
        return found
