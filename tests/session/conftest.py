"""What several tests of sessions share."""

import sys
from pathlib import Path

import pytest

# What a script makes of a file is what its test makes of it.
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))


@pytest.fixture
def load(tmp_path):
    """Reads the bytes of a file of llama.cpp."""
    # Here, for the modules of this folder are typechecked from the first import on.
    from tests.session.llama_bytes import PLAIN, read

    def at(content, groups=PLAIN, **options):
        path = tmp_path / "session.bin"
        path.write_bytes(content)
        return read(path, groups, **options)

    return at


@pytest.fixture
def library(tmp_path):
    """A new folder of sessions."""
    from kvrt.session.library import Library

    return Library(tmp_path / "sessions")
