"""Real tokenizers, trained on a few lines, in folders as models come with."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LINES = (
    "The caesura is the pause inside a line of verse, after which the line goes on.",
    "A rollout engine that can be paused at any step: abort, retract, in place.",
    "def answer(question: str) -> int:\n    return 42  # of course\n",
    "The quick brown fox jumps over the lazy dog. Stop! Observation: done.",
    "Der Fluß fließt über die Brücke; l'été, ça va? Señor, mañana.",
    "你好、世界。今天天气很好。日本語のテキスト、한국어 텍스트",
    "emoji 🎉🎉 👩‍👩‍👧 🇩🇪 👍🏽 combining e\u0301 a\u0308 नमस्ते",
)

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message['role']) }}
    {%- endif %}
{{ '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] | trim }}{% endgeneration %}
    {%- else %}
        {{- message['content'] }}
    {%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if tools %}
TOOLS: {{ tools | tojson(indent=2) }}
{%- endif %}
{%- if thinking is defined and thinking %}
<think>
{%- endif %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""


def make_byte_level(folder: Path, *, vocab_size: int = 400, **config: object) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    # An added token that is not special: its text stays when special tokens are skipped.
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return _save(folder, tokenizer, config)


def make_sentencepiece(folder: Path, *, vocab_size: int = 400, **config: object) -> Path:
    """Write a BPE as Llama 2 has: ``▁`` for spaces, and bytes for characters that the vocabulary lacks."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    # The trainer itself would break ties between characters differently in each run.
    counts = Counter("".join(LINES).replace(" ", "▁"))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 256,
        special_tokens=["<unk>", *SPECIALS],
        initial_alphabet=sorted(counts, key=lambda character: (-counts[character], character))[:70],
        limit_alphabet=70,
        show_progress=False,
    )
    trained.train_from_iterator(LINES, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = dict(model["vocab"])
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", *SPECIALS])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return _save(folder, tokenizer, config)


def _save(folder: Path, tokenizer: Tokenizer, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 1 << 20,
        "clean_up_tokenization_spaces": False,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values, ensure_ascii=False), "utf-8")
    return folder


def pieces(values: Iterable[int], sizes: Iterable[int]) -> list[list[int]]:
    """Cut the values into parts of these sizes, again and again; what is left over is the last part."""
    rest = list(values)
    parts = []
    for size in sizes:
        parts.append(rest[:size])
        rest = rest[size:]
    return [*parts, rest]
