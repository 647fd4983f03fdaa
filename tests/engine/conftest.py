"""Engines for the tests of this folder: closed, and their thread gone, at the end of each."""

import families
import pytest
from kvscope.engine import Engine
from serving import OPTIONS, engine_threads, scripted_engine


@pytest.fixture(autouse=True, scope="module")
def tiny_maths(one_thread):
    """All of this folder's."""


@pytest.fixture
def make_engine(tiny_folder):
    """`make_engine(**options)`: engines on the tiny Llama."""
    engines = []

    def make(model=tiny_folder, **options):
        engines.append(Engine(model, **{**OPTIONS, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    assert engine_threads() == []


@pytest.fixture
def engine(make_engine):
    return make_engine()


@pytest.fixture
def make_scripted(monkeypatch, tiny_folder):
    """`make_scripted(script, seconds=, eos_token_ids=, folder=, **options)`: (engine, model) that says the script."""
    engines = []

    def make(script, folder=tiny_folder, **options):
        engine, model = scripted_engine(monkeypatch, folder, script, **options)
        engines.append(engine)
        return engine, model

    yield make
    for engine in engines:
        engine.close()
    assert engine_threads() == []


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory):
    """A tokenizer with byte fallback and the tokens DEF, G, HI and J."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    families.llama_sentencepiece().save_pretrained(folder)
    return str(folder)
