"""A tokenizer for engines that tests script."""

import pytest
from support.tokenizers import make_byte_level

from caesura.client.text import TextTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return TextTokenizer.from_folder(make_byte_level(tmp_path_factory.mktemp("tokenizer")))
