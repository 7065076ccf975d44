"""Text on both sides of the tokens: tokenizers, incremental decoding, stop strings, chat templates. No torch."""

from .detokenizer import Detokenizer, output_text
from .stop_strings import StopMatcher, StopStrings
from .tokenizer import TextTokenizer, TokenizerMissing

__all__ = [
    "Detokenizer",
    "StopMatcher",
    "StopStrings",
    "TextTokenizer",
    "TokenizerMissing",
    "output_text",
]
