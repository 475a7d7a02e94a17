"""Tests that run twice: with the compiled code, and with its twin in Python. Import `twin` to have a module do so."""

import pytest

from taccl.runtime import native
from taccl.runtime.codecs import compiled


@pytest.fixture(autouse=True, scope="module", params=["compiled", "python"])
def twin(request):
    if request.param == "compiled":
        if native.library() is None:
            pytest.skip(f"no compiled code: {native.why_not()}")
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        patch.setattr(compiled, "library", lambda: None)
        yield
