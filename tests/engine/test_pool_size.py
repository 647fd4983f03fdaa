"""The pool by blocks, bytes or a share of memory: what is asked for is what is taken, or a sentence says why not."""

import gc
import json
import subprocess
import sys

import psutil
import pytest
import tiny
import torch
from kvscope.engine import Engine, EngineConfig, assembly, pool_size
from kvscope.engine.assembly import assemble
from kvscope.engine.pool_size import free_memory

PLAIN = {"dtype": "float32", "kernels": "reference", "device": "cpu"}
MIB = 2**20


def assembled(folder, **options):
    return assemble(EngineConfig.from_options(folder, {**PLAIN, **options}))


def config_of(folder, **options):
    return assembled(folder, **options).config


def test_the_default_pool_is_the_smaller_of_512_blocks_and_a_tenth_of_free_memory(monkeypatch, tiny_folder):
    block = assemble(EngineConfig.from_options(tiny_folder, PLAIN)).info.block_bytes
    for free, num_blocks in ((block * 10_000, 512), (block * 1000, 100), (block * 20, 16)):
        monkeypatch.setattr(pool_size, "free_memory", lambda device, free=free: free)
        assert config_of(tiny_folder).num_blocks == num_blocks
    with pytest.raises(
        ValueError, match=r"num_blocks=21: the pool would take \d+ MiB with block_size=16, and \d+ MiB are free"
    ):
        config_of(tiny_folder, num_blocks=21)


@pytest.mark.parametrize("block_size", [10**7, 10**30])
def test_a_block_larger_than_memory_is_said_before_any_is_taken(monkeypatch, tiny_folder, block_size):
    monkeypatch.setattr(pool_size, "free_memory", lambda device: 2**30)
    monkeypatch.setattr(assembly, "KVStorage", type("NoStorage", (assembly.KVStorage,), {"__init__": None}))
    with pytest.raises(
        ValueError, match=rf"^num_blocks=16: the pool would take \d+ MiB with block_size={block_size}, and"
    ):
        config_of(tiny_folder, block_size=block_size)


def test_the_memory_of_a_container_counts(tmp_path):
    cpu = torch.device("cpu")
    machine = free_memory(cpu, tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 150000\n")
    assert free_memory(cpu, tmp_path) == 450_000 < machine
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(cpu, tmp_path) > 1_000_000


def test_a_pool_by_bytes_holds_as_many_whole_blocks_as_fit(tiny_folder):
    block = assembled(tiny_folder).info.block_bytes
    for num_bytes, num_blocks in ((2 * block, 2), (10 * block, 10), (11 * block - 1, 10)):
        built = assembled(tiny_folder, kv_cache_memory_bytes=num_bytes)
        assert built.config.num_blocks == built.info.num_blocks == num_blocks
        assert built.info.pool_bytes == num_blocks * block <= num_bytes
        pages = {pages.data_ptr(): pages for pages, _ in map(built.core.runner.storage.pages, range(2))}.values()
        assert sum(tensor.untyped_storage().nbytes() for tensor in pages) == built.info.pool_bytes
    assert config_of(tiny_folder, kv_cache_memory_bytes=10 * block, block_size=32).num_blocks == 5
    message = (
        rf"^kv_cache_memory_bytes={block}: a pool has at least 2 blocks, the null block and one to give out, which take "
        rf"{2 * block} bytes with block_size=16, and there are {block}$"
    )
    with pytest.raises(ValueError, match=message):
        config_of(tiny_folder, kv_cache_memory_bytes=block)


def test_a_pool_by_share_gets_what_loading_left_of_it(monkeypatch, tiny_folder):
    block = assembled(tiny_folder).info.block_bytes
    monkeypatch.setattr(pool_size, "free_memory", lambda device: 1000 * block)

    def share(value, took):
        held = iter([7 * block, 7 * block + took])
        monkeypatch.setattr(pool_size, "held_memory", lambda device: next(held))
        return config_of(tiny_folder, gpu_memory_utilization=value).num_blocks

    assert share(0.5, took=100 * block) == 400
    assert share(0.5, took=0) == 500, "another engine has loaded these weights: they cost nothing"
    assert share(1, took=block // 2) == 999
    assert share(0.5, took=-3 * block) == 500, "loading can end with less than it began with, but gives nothing"
    with pytest.raises(
        ValueError, match=r"^gpu_memory_utilization=0\.1: that is 0 MiB, of which loading the model took 0 MiB; a pool"
    ):
        share(0.1, took=99 * block)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_blocks": 8, "kv_cache_memory_bytes": 4096},
            "^num_blocks=8 and kv_cache_memory_bytes=4096: each says how large",
        ),
        ({"num_blocks": 8, "gpu_memory_utilization": 0.5}, "^num_blocks=8 and gpu_memory_utilization=0.5: each says"),
        (
            {"kv_cache_memory_bytes": 4096, "gpu_memory_utilization": 0.5},
            "^kv_cache_memory_bytes=4096 and gpu_memory_utilization=0.5: each says",
        ),
        ({"kv_cache_memory_bytes": 0}, "^kv_cache_memory_bytes=0: must be an integer of at least 1"),
        ({"gpu_memory_utilization": 0}, "^gpu_memory_utilization=0: must be a share of memory above 0, at most 1"),
        ({"gpu_memory_utilization": 1.5}, "^gpu_memory_utilization=1.5: must be a share"),
        ({"gpu_memory_utilization": float("nan")}, "^gpu_memory_utilization=nan: must be a share"),
        ({"gpu_memory_utilization": True}, "^gpu_memory_utilization=True: must be a share"),
    ],
)
def test_contradictions_and_nonsense_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**given)


def test_memory_for_swapping_must_be_free_beside_the_pool(monkeypatch, tiny_folder):
    block = assembled(tiny_folder).info.block_bytes
    monkeypatch.setattr(pool_size, "free_memory", lambda device: 30 * block)
    with pytest.raises(
        ValueError, match=r"^num_cpu_blocks=11: they would take \d+ MiB with block_size=16, and \d+ MiB are free"
    ):
        config_of(tiny_folder, num_blocks=20, preemption_mode="swap", num_cpu_blocks=11)


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss


MEASURE = """
import gc, json, sys
import psutil, torch
from kvscope.engine import Engine
from kvscope.engine.pool_size import free_memory

PLAIN, MIB = {"dtype": "float32", "kernels": "reference", "device": "cpu"}, 2**20

def resident():
    gc.collect()
    return psutil.Process().memory_info().rss

with Engine(sys.argv[1], **PLAIN, num_blocks=8):  # libraries are loaded
    before = resident()
    by_bytes = Engine(sys.argv[1], **PLAIN, kv_cache_memory_bytes=100 * MIB)
    first = resident() - before
    by_share = Engine(sys.argv[1], **PLAIN, gpu_memory_utilization=60 * MIB / free_memory(torch.device("cpu")))
    second = resident() - before - first
    said = [by_bytes.info.pool_bytes, by_share.info.pool_bytes]
    by_bytes.close()
    by_share.close()
    print(json.dumps([first, second, resident() - before, *said]))
"""


def test_the_memory_taken_is_what_the_engine_says_and_goes_when_it_closes(tiny_folder):
    """Two engines in one process, a fresh one: where much was freed before, a pool may take nothing new."""
    command = [sys.executable, "-c", MEASURE, str(tiny_folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    first, second, left, by_bytes, by_share = json.loads(done.stdout.splitlines()[-1])
    assert by_bytes == 100 * MIB and by_share == pytest.approx(60 * MIB, rel=0.3)
    assert first == pytest.approx(by_bytes, rel=0.1) and second == pytest.approx(by_share, rel=0.15)
    assert left < 20 * MIB


def test_the_weights_are_held_once_and_counted_as_they_are_held(tmp_path):
    folder = tiny.tiny_llama(tmp_path, hidden_size=512, intermediate_size=2048, num_hidden_layers=4, tokenizer=False)
    with Engine(folder, **PLAIN, num_blocks=8) as first:
        before = resident()
        with Engine(folder, **PLAIN, num_blocks=8) as second:
            assert second.info.weight_bytes == first.info.weight_bytes == 4 * first.info.num_parameters > 50 * MIB
            assert resident() - before < 20 * MIB
