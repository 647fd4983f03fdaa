"""The table of operations: who serves whom, how one is chosen, and that all have the same signatures."""

import inspect
import threading

import pytest
import torch
from kvscope.kernels import ops, reference


def test_resolve_by_name_device_and_dtype():
    assert ops.resolve("auto", "cpu", torch.float32).name == "cpu"
    assert ops.resolve("auto", "cpu", torch.bfloat16) is ops.resolve("cpu", "cpu", torch.bfloat16)
    assert ops.resolve("auto", "cpu", torch.float16).name == "reference"
    assert ops.resolve("auto", "meta", torch.float32).name == "reference"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert ops.resolve("auto", "cuda", dtype).name == "triton"
    assert ops.resolve("reference", "meta", torch.float16).name == "reference"


def test_what_does_not_exist_or_does_not_serve_is_named():
    with pytest.raises(
        ValueError, match="kernels='fast': the implementations are 'auto', 'reference', 'cpu', 'triton'"
    ):
        ops.resolve("fast")
    with pytest.raises(ValueError, match="serves dtype float32, bfloat16, not float16; use 'reference'"):
        ops.resolve("cpu", "cpu", torch.float16)
    with pytest.raises(ValueError, match="serves the device cpu, not meta; use 'auto'"):
        ops.resolve("cpu", "meta", torch.float32)
    with pytest.raises(ValueError, match="kernels='triton' serves the device cuda, not cpu; use 'auto'"):
        ops.resolve("triton", "cpu", torch.float32)
    with pytest.raises(ValueError, match="'fast'"), ops.using("fast"):
        pass


@pytest.mark.parametrize("operation", ops.OPERATIONS)
def test_every_implementation_has_every_operation_with_one_signature(operation):
    documented = getattr(ops, operation)
    assert len(inspect.getdoc(documented)) > 60
    parameters = [(p.name, p.kind, p.default) for p in inspect.signature(documented).parameters.values()]
    for name in ops.IMPLEMENTATIONS:
        function = getattr(ops._load(name), operation)
        assert [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()] == parameters, (
            name
        )


def test_using_holds_for_direct_calls_inside_the_block_and_this_thread(monkeypatch):
    calls = []

    def spy(gate_up):
        calls.append(threading.current_thread().name)
        return reference.silu_mul(gate_up)

    watched = ops.Ops("reference", **{o: getattr(reference, o) for o in ops.OPERATIONS} | {"silu_mul": spy})
    load = ops._load
    monkeypatch.setattr(ops, "_load", lambda name: watched if name == "reference" else load(name))
    x = torch.randn(2, 8)
    ops.silu_mul(x)
    assert calls == []
    with ops.using("reference"):
        with ops.using("cpu"):
            ops.silu_mul(x)
        assert calls == []
        other = threading.Thread(target=ops.silu_mul, args=(x,))
        other.start()
        other.join()
        assert calls == []
        ops.silu_mul(x)
    assert len(calls) == 1
    ops.silu_mul(x)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_every_operation_can_be_called_directly(name):
    """A layer of a tiny model by hand: the functions of the module route to the implementation, arguments and all."""
    torch.manual_seed(0)
    with ops.using(name):
        layout = ops.page_layout(4, 1, 8, torch.float32)
        pages = torch.zeros(4, layout.page_bytes, dtype=torch.uint8)
        residual = torch.zeros(3, 16)
        x = ops.add_rms_norm(torch.randn(3, 16), residual, torch.ones(16), 1e-5, out_dtype=torch.float32)
        assert torch.equal(x, ops.rms_norm(residual, torch.ones(16), 1e-5, out_dtype=torch.float32))
        packed = ops.pack_linear(torch.randn(32, 16), torch.randn(32), torch.float32)
        assert packed.rows(torch.tensor([5, 0])).shape == (2, 16)
        qkv = ops.linear(x, packed).view(3, 4, 8)
        q, k, v = qkv.split((2, 1, 1), dim=1)
        ops.rotary(q, k, torch.arange(3), torch.ones(8, 8))
        ops.write_kv(k, v, pages, layout, torch.tensor([8, 9, 10]))
        ops.copy_pages([pages], torch.tensor([[2, 1]]))
        assert torch.equal(ops.gather_kv(pages, layout, torch.tensor([1]))[0][:3], k)
        table, starts, lens = (torch.tensor(t, dtype=torch.int32) for t in ([[1]], [0, 3], [3]))
        out = ops.paged_attention(q, pages, layout, table, starts, lens, scale=0.35)
        torch.testing.assert_close(out[0], v[0].expand(2, 8))  # the first token sees itself alone
        assert ops.silu_mul(out.reshape(3, 16)).shape == (3, 8)
        logits = out.reshape(3, 16)
        one, off = torch.ones(3), torch.zeros(3)
        tokens = ops.sample(logits, one, torch.ones(3, dtype=torch.int32), one, off, torch.rand(3, dtype=torch.float64))
        assert torch.equal(tokens, ops.greedy(logits))
