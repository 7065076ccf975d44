"""Text from and to tokens: clients, tokenizers, detokenizers, stop strings, chat templates. No torch."""

from .detokenizer import Detokenizer, output_text
from .stop_strings import StopMatcher, StopStrings
from .text_client import AsyncTextClient, ChatAnswer, TextClient
from .tokenizer import TextTokenizer, TokenizerMissing
from .tokenizer_manager import Chunk, Sample

__all__ = [
    "AsyncTextClient",
    "ChatAnswer",
    "Chunk",
    "Detokenizer",
    "Sample",
    "StopMatcher",
    "StopStrings",
    "TextClient",
    "TextTokenizer",
    "TokenizerMissing",
    "output_text",
]
