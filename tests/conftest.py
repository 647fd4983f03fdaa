"""What every test shares: no network for the hub, quiet libraries, and tiny checkpoints made once a session."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read at import: no test may depend on what a server says today
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import tiny
import torch
import transformers
from hypothesis import settings
from kvscope.kernels.cpu import compiler

# `make test` draws the same examples every time; `make test-full` looks for new ones (--hypothesis-profile=default).
settings.register_profile("same", derandomize=True)
settings.load_profile("same")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def pytest_collection_modifyitems(items):
    """Browser tests last: their driver keeps an event loop running in this thread to the end of the session."""
    items.sort(key=lambda item: "browser" in item.path.parts)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny Llama with a tokenizer and a chat template; read only."""
    return tiny.tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_folder_without_template(tmp_path_factory):
    """The same model with a tokenizer that has no chat template; read only."""
    return tiny.tiny_llama(tmp_path_factory.mktemp("tiny-base"), chat_template=False)


@pytest.fixture(scope="module")
def one_thread():
    """Products of 64 columns are done before a second thread has woken up; with other work on the machine it costs tenfold."""
    before = torch.get_num_threads(), compiler.num_threads()
    torch.set_num_threads(1)
    compiler.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    compiler.set_num_threads(before[1])
