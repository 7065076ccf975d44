"""Compiled code and the torch code that is there without it pass the same tests."""

import pytest

from caesura.transfer import words


@pytest.fixture(params=["compiled", "torch"], autouse=True, scope="module")
def implementation(request):
    """Let the compiled functions compute, or the torch code that is there without them."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(words, "library", lambda: None)
        elif words.library() is None:
            pytest.skip("the extension was not built")
        yield
