"""What every test shares: no network for the hub, quiet libraries, and tiny checkpoints made once a session."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read at import: no test may depend on what a server says today
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import tiny
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny Llama with a tokenizer and a chat template; read only."""
    return tiny.tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_folder_without_template(tmp_path_factory):
    """The same model with a tokenizer that has no chat template; read only."""
    return tiny.tiny_llama(tmp_path_factory.mktemp("tiny-base"), chat_template=False)
