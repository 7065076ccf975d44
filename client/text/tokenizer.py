"""``TextTokenizer``: the tokenizer of a Hugging Face model folder, from text to ids and back.

Invariants:
- The results equal those of ``transformers.AutoTokenizer``, without importing transformers, without spaces
  between special tokens and without ``clean_up_tokenization_spaces``.
- A tokenizer is immutable after loading, so threads may share it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from ..exceptions import CheckpointError, InvalidRequest
from .chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplate

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


DECODE_LONG = 4096


class TokenizerMissing(CheckpointError):  # noqa: N818  (named as its base is)
    """The folder has no tokenizer."""


class TextTokenizer:
    """The tokenizer of one folder.

    Attributes:
        skipped: the ids that ``skip_special_tokens`` leaves out.
        byte_ids: ids of one byte each (SentencePiece's byte fallback); empty for byte-level tokenizers.
        token_bytes: bytes by id, if all texts are the UTF-8 of their tokens' bytes; None otherwise.
        size: first id that is unknown; it and all above decode to nothing.
        special_texts: the texts of ``skipped``.
        chat_templates: all chat templates, one after the other.
        response_template: transformers' description of the form of answers, or None.
        longest: characters of the longest entry: a text of ``n`` has at least ``n / longest`` tokens, unless
            the tokenizer drops or joins characters.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = ChatTemplate(chat_templates, special_tokens)
        added = tokenizer.get_added_tokens_decoder()
        self.skipped = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_texts = frozenset(
            token.content for token in added.values() if token.special and token.content
        )
        self.chat_templates = "\n".join(chat_templates.values())
        self.response_template = response_template
        self.byte_ids = _byte_ids(tokenizer)
        byte_level = decoder_state(tokenizer).get("type") == "ByteLevel"
        self.token_bytes: Mapping[int, bytes] | None = _TokenBytes(tokenizer) if byte_level else None
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.size = 1 + max(vocabulary.values(), default=-1)
        self.longest = max(map(len, vocabulary), default=1)

    @classmethod
    def from_folder(cls, path: str | Path) -> "TextTokenizer":
        """Read tokenizer, configuration and chat templates; CheckpointError if a file cannot be read."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            reason = f"{folder} has no tokenizer.json (transformers' save_pretrained writes one)"
            raise TokenizerMissing(reason, path=str(file))
        try:
            tokenizer = Tokenizer.from_str(file.read_text("utf-8"))
        except Exception as error:  # the library raises plain Exception for whatever it cannot parse
            raise CheckpointError(f"{file} cannot be read: {error}", path=str(file)) from error
        config = _read_config(folder / "tokenizer_config.json")
        fallback = _read_config(folder / "special_tokens_map.json")
        special = {
            name: text
            for name in _SPECIAL_TOKENS
            if (text := _token_text(config.get(name, fallback.get(name)))) is not None
        }
        _add_missing(tokenizer, special)
        response = config.get("response_template")
        return cls(
            tokenizer,
            special,
            _chat_templates(folder, config),
            response if isinstance(response, dict) else None,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, in which special tokens are recognised."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"text is not valid Unicode: {error}", field="text") from error
        # Without offsets; and unlike ``encode`` it lets other threads run meanwhile.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; unknown ones are left out."""
        try:
            if len(ids) > DECODE_LONG:  # unlike ``decode`` this lets other threads run meanwhile
                return self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"not token ids: {error}", field="tokens") from error

    @property
    def backend(self) -> Tokenizer:
        """The library's object."""
        return self._tokenizer

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return a conversation's prompt, to be encoded without special tokens, or InvalidRequest.

        ``variables`` are the template's, and options of :meth:`ChatTemplate.render`.
        """
        return self._chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet of byte-level vocabularies (Radford et al. 2019, encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_of_character()


def bytes_of(written: str) -> bytes:
    """Return the bytes of an entry of a byte-level vocabulary; one with other characters is itself."""
    found = [_BYTES.get(character) for character in written]
    return written.encode() if None in found else bytes(byte for byte in found if byte is not None)


class _TokenBytes(dict[int, bytes]):
    """Bytes of tokens, filled as they are asked for; unknown ids have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        found = self[token] = bytes_of(self._tokenizer.id_to_token(token) or "")
        return found


def decoder_state(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the decoder of a tokenizer as in its file; empty if it has none."""
    decoder = tokenizer.decoder
    return {} if decoder is None else msgspec.json.decode(decoder.__getstate__(), type=dict[str, Any])


def _byte_ids(tokenizer: Tokenizer) -> frozenset[int]:
    if tokenizer.decoder is None or tokenizer.decoder.decode(["<0x41>"]) != "A":
        return frozenset()
    found = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in found if token_id is not None)


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{file} cannot be read: {error}", path=str(file)) from error


def _token_text(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _add_missing(tokenizer: Tokenizer, special: Mapping[str, str]) -> None:
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = dict.fromkeys(text for text in special.values() if text not in known)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in missing])


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    in_config = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(in_config, str):
        templates["default"] = in_config
    elif isinstance(in_config, list):
        templates.update({str(each["name"]): str(each["template"]) for each in in_config})
    alone = _read_config(folder / "chat_template.json").get("chat_template")
    if isinstance(alone, str):
        templates["default"] = alone
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[file.stem] = file.read_text("utf-8")
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text("utf-8")
    for name, source in templates.items():
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise CheckpointError(
                f"chat template {name!r} of {folder} is over the limit of "
                f"{MAX_TEMPLATE_CHARACTERS} characters"
            )
    return templates
