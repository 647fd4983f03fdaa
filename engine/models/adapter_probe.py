"""Is a transformers model really served by paged attention? Asked once, when it is loaded.

Some architectures never look the attention function up, or not in every layer, or compute positions, masks or windows
on the side; with such a model the text would be wrong and nothing would say so. The probe lets two sequences of 8
tokens through, cut into pieces that share steps, as an engine would, and demands:

1. every layer calls our function exactly once a forward, with one shape of K and V;
2. a layer whose window the config states asks for that window (8 tokens do not reach the end of any window);
3. the output of every attention module, and the logits, equal those of the model's own eager attention on each
   sequence alone.

    step 1   a0 a1 a2 a3 a4 | b0 b1 b2          positions restart, rows differ in length
    step 2   a5 a6 a7 | b3 b4 b5 b6 b7          every row continues over its cache
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..kvcache.storage import KVStorage
from ..scheduling.batch import Batch
from .adapter_attention import NAME, STEP, AttentionCall, AttentionStep
from .base import KVGroup
from .decoder_config import UnsupportedModel

if TYPE_CHECKING:
    from kvscope.kernels.ops import Ops
    from transformers import PreTrainedModel

NUM_TOKENS = 8
_BLOCK_SIZE = 16
_TABLES = ((2,), (1,))  # block ids of the two sequences; block 0 is the null block
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1}  # ‖paged − eager‖ / ‖eager‖


@torch.inference_mode()
def probe(model: PreTrainedModel, *, dtype: torch.dtype, kernels: Ops) -> list[AttentionCall]:
    """The attention calls of one forward, in order of layers. Raises UnsupportedModel with what is wrong."""
    config = model.config.get_text_config()
    device = model.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (2, NUM_TOKENS), generator=generator).to(device)

    calls = _discover(model, ids[0], kernels)
    first = calls[0]
    group = KVGroup(tuple(range(len(calls))), first.num_kv_heads, first.head_dim)
    storage = KVStorage([group], num_blocks=3, block_size=_BLOCK_SIZE, dtype=dtype, device=device, kernels=kernels)
    modules = [call.module for call in calls]

    own = _Outputs(modules)
    model.set_attn_implementation("eager")
    try:
        with own:
            expected = [
                model(input_ids=row[None], position_ids=_positions(0, NUM_TOKENS, device), use_cache=False).logits[0]
                for row in ids
            ]
    finally:
        model.set_attn_implementation(NAME)

    ours, found = _Outputs(modules), [[], []]
    with ours:
        for spans in (((0, 5), (0, 3)), ((5, 8), (3, 8))):
            logits = _step(model, ids, spans, storage, kernels)
            for row, part in enumerate(logits.split([stop - start for start, stop in spans])):
                found[row].append(part)

    tolerance = _TOLERANCE.get(dtype, 1e-2)
    for call, eager, steps in zip(calls, own.values, ours.values, strict=True):
        paged = torch.cat([steps[0][:5], steps[1][:3], steps[0][5:], steps[1][3:]])  # a0–a7, b0–b7
        _compare(f"{type(call.module).__name__} of layer {call.layer}", paged, torch.cat(eager), tolerance)
    _compare("the logits", torch.cat([torch.cat(parts) for parts in found]), torch.cat(expected), tolerance)
    return calls


def _discover(model: PreTrainedModel, ids: torch.Tensor, kernels: Ops) -> list[AttentionCall]:
    """One forward that only watches who calls, and with what."""
    config = model.config.get_text_config()
    batch = _batch([ids], ((0, NUM_TOKENS),), ids.device)
    step = AttentionStep(kernels, batch, None, calls=[])
    _forward(model, batch, step)
    layers = sorted(call.layer for call in step.calls)
    num_layers = config.num_hidden_layers
    if layers != list(range(num_layers)):
        silent = sorted(set(range(num_layers)) - set(layers))
        if silent:
            raise UnsupportedModel(
                f"{len(silent)} of its {num_layers} layers never call the attention function "
                f"(the first is layer {silent[0]}), so they keep their past somewhere else than in pages"
            )
        raise UnsupportedModel(
            f"its {num_layers} layers call the attention function {len(layers)} times a forward, not once each"
        )
    calls = sorted(step.calls, key=lambda call: call.layer)
    shapes = {(call.num_heads, call.num_kv_heads, call.head_dim) for call in calls}
    if len(shapes) > 1:
        raise UnsupportedModel(
            f"its layers differ in shape: (heads, KV heads, head size) is {' or '.join(map(str, sorted(shapes)))}"
        )
    if calls[0].num_heads % calls[0].num_kv_heads:
        raise UnsupportedModel(f"{calls[0].num_heads} heads are not a multiple of {calls[0].num_kv_heads} KV heads")
    for call, window in zip(calls, stated_windows(config), strict=True):
        if call.window != window:
            raise UnsupportedModel(
                f"layer {call.layer} asks for a window of {call.window or 'all'} tokens where the config states "
                f"{window or 'all'}"
            )
    return calls


def stated_windows(config) -> list[int]:
    """The window of each layer as the config states it; 0 = all."""
    size = getattr(config, "sliding_window", None) or 0
    if getattr(config, "use_sliding_window", True) is False:
        size = 0
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [size] * config.num_hidden_layers
    return [size if kind == "sliding_attention" else 0 for kind in kinds]


def _step(model, ids: torch.Tensor, spans, storage: KVStorage, kernels: Ops) -> torch.Tensor:
    """One packed step of the two sequences; logits of every token: [T, vocab]."""
    batch = _batch(list(ids), spans, ids.device)
    return _forward(model, batch, AttentionStep(kernels, batch, storage))


def _forward(model, batch: Batch, step: AttentionStep) -> torch.Tensor:
    arguments = {STEP: step, "use_cache": False}
    return model(input_ids=batch.input_ids[None], position_ids=batch.positions[None], **arguments).logits[0]


def _batch(ids: list[torch.Tensor], spans, device: torch.device) -> Batch:
    """Row r gives its tokens start : stop; all of it fits into the row's one block."""
    lengths = torch.tensor([0, *(stop - start for start, stop in spans)])
    slots = [torch.arange(start, stop) + _TABLES[row][0] * _BLOCK_SIZE for row, (start, stop) in enumerate(spans)]
    return Batch(
        input_ids=torch.cat([row[start:stop] for row, (start, stop) in zip(ids, spans, strict=True)]),
        positions=torch.cat([torch.arange(start, stop, device=device) for start, stop in spans]),
        query_start_loc=lengths.cumsum(0).to(device, torch.int32),
        cache_lens=torch.tensor([start for start, _ in spans], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([stop for _, stop in spans], dtype=torch.int32, device=device),
        slot_mapping=(torch.cat(slots).to(device),),
        block_tables=(torch.tensor(_TABLES[: len(spans)], dtype=torch.int32, device=device),),
        logits_indices=torch.arange(int(lengths.sum()), device=device),
        copies=(torch.zeros(0, 2, dtype=torch.long, device=device),),
    )


def _positions(start: int, stop: int, device: torch.device) -> torch.Tensor:
    return torch.arange(start, stop, device=device)[None]


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-12))
    if not error <= tolerance:  # also when it is NaN
        raise UnsupportedModel(
            f"on {NUM_TOKENS} tokens {what} differ{'s' if what[0] != 't' else ''} from eager attention by a relative "
            f"{error:.2g} (at most {tolerance:g} is rounding), so some of its maths goes around the attention function"
        )


class _Outputs:
    """Records what each module gives, call by call: `values[module]` is a list of [tokens, hidden]."""

    def __init__(self, modules: list[torch.nn.Module]):
        self._modules = modules
        self.values: list[list[torch.Tensor]] = [[] for _ in modules]
        self._handles: list = []

    def __enter__(self) -> _Outputs:
        for module, values in zip(self._modules, self.values, strict=True):

            def record(_module, _arguments, output, values=values):
                values.append((output[0] if isinstance(output, tuple) else output)[0])

            self._handles.append(module.register_forward_hook(record))
        return self

    def __exit__(self, *exc_info) -> None:
        for handle in self._handles:
            handle.remove()
