"""Captured kernel calls: a replay computes what the calls would, from what their tensors hold now."""

import gc
import subprocess
import sys
import threading

import pytest
import torch
from kvscope.kernels import ops
from kvscope.kernels.cpu import compiler
from kvscope.kernels.cpu.replay import KernelGraph, NotCapturable, ReusedMemory
from kvscope.kernels.cpu.shared import own_scratch, scratch

K = ops.resolve("cpu", "cpu", torch.float32)


def two_layers(x, weights, norm):
    for packed in weights:
        x = K.rms_norm(K.linear(x, packed), norm, 1e-6, out_dtype=torch.float32)
    return x


@pytest.fixture
def problem():
    return (
        torch.randn(3, 40),
        [K.pack_linear(torch.randn(40, 40), None, torch.float32) for _ in range(2)],
        torch.ones(40),
    )


def test_a_replay_computes_from_new_values(problem):
    x, weights, norm = problem
    graph = KernelGraph(ReusedMemory())
    got = graph.capture(lambda: two_layers(x, weights, norm))
    assert torch.equal(got, two_layers(x, weights, norm))
    for _ in range(3):
        x.normal_()
        want = two_layers(x.clone(), weights, norm)
        assert not torch.equal(got, want)
        assert graph.replay() and torch.equal(got, want)


@pytest.mark.parametrize("quantization", [None, "int8", "int8-dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_every_kind_are_captured(dtype, quantization):
    x, weight = torch.randn(3, 64, dtype=dtype), torch.randn(64, 64)
    packed, gated = (K.pack_linear(weight, None, dtype, quantization, gated=gated) for gated in (False, True))
    graph = KernelGraph(ReusedMemory())
    got = graph.capture(lambda: (K.linear(x, packed), K.linear_silu_mul(x, gated)))
    x.normal_()
    assert graph.replay()
    assert torch.equal(got[0], K.linear(x, packed)) and torch.equal(got[1], K.linear_silu_mul(x, gated))


def test_what_torch_computes_is_refused(problem):
    x, weights, norm = problem
    for compute in (
        lambda: K.linear(x, weights[0]) + 1,
        lambda: x.T.contiguous(),
        lambda: x.T.reshape(-1),
        lambda: x.double(),
    ):
        with pytest.raises(NotCapturable):
            KernelGraph(ReusedMemory()).capture(compute)
    assert torch.equal(K.linear(x, weights[0]) + 0, K.linear(x, weights[0]))  # and nothing of it stays behind
    KernelGraph(ReusedMemory()).capture(lambda: two_layers(x.view(3, 40)[:, :40], weights, norm))


def test_a_value_outside_its_table_is_told():
    heads, table = torch.randn(2, 3, 8), torch.randn(5, 8)
    positions = torch.tensor([0, 4])
    graph = KernelGraph(ReusedMemory())
    graph.capture(lambda: K.rotary(heads[:, :2], heads[:, 2:], positions, table))
    assert graph.replay()
    positions[1] = 5
    assert not graph.replay()


def test_memory_is_given_out_again_when_nobody_refers_to_it():
    memory = ReusedMemory()
    first = memory.empty((10, 100), torch.float32)
    part, address = first[3:4].view(10, 10), first.data_ptr()
    assert address % 64 == 0
    del first
    assert memory.empty((1000,), torch.float32).data_ptr() != address  # `part` still looks at it
    del part
    gc.collect()
    assert memory.empty((900,), torch.float32).data_ptr() == address
    assert memory.empty((2, 0), torch.bfloat16).shape == (2, 0)
    assert memory.num_bytes == 2 * 4000 + 64


def test_graphs_share_memory_but_not_results(problem):
    x, weights, norm = problem
    memory = ReusedMemory()
    graphs = [KernelGraph(memory) for _ in range(2)]
    y = torch.randn(3, 40)
    got_x, got_y = (
        g.capture(lambda at=at: two_layers(at, weights, norm)) for g, at in zip(graphs, (x, y), strict=True)
    )
    held = memory.num_bytes
    want_x, want_y = got_x.clone(), got_y.clone()
    assert graphs[0].replay() and torch.equal(got_y, want_y)
    assert graphs[1].replay() and torch.equal(got_x, want_x)
    assert memory.num_bytes == held


def test_captured_scratch_is_nobody_elses():
    mine, held = scratch(1000), []
    with own_scratch(held):
        inside = [scratch(100), scratch(5000), scratch(100)]
    assert inside[1] == inside[2] and mine not in inside
    assert any(array.ctypes.data <= inside[0] < array.ctypes.data + array.nbytes for array in held)
    assert scratch(1000) == mine
    with own_scratch(held):
        assert scratch(3000) == inside[2]  # one captured later uses the same


def test_a_capture_imports_no_compiler():
    """It would stand still for a second or two in the middle of a user's first request."""
    script = """
import sys, torch
from kvscope.kernels.cpu.replay import KernelGraph, ReusedMemory
with torch.inference_mode():
    KernelGraph(ReusedMemory()).capture(lambda: torch.empty(2, 3).view(6))
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_other_threads_are_not_captured(problem):
    x, weights, norm = problem
    calls = []
    with compiler.recording_calls(calls):
        other = threading.Thread(target=two_layers, args=(x, weights, norm))
        other.start()
        other.join()
        assert calls == []
        K.linear(x, weights[0])
    K.linear(x, weights[0])
    assert len(calls) == 1
