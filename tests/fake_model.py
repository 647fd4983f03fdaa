"""A model whose answer depends on every byte of bookkeeping, in microseconds.

It writes each token's id as its K row and each token's position as its V row, and derives the next token from the rows
that it reads back through the block tables of all KV groups. A wrong block table, slot, position, copy or prefix hit
therefore changes the output, and so does a block that someone else has written. `reference` says what the output must
be, from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from kvscope.engine import EngineConfig, EngineCore, EventLog, SamplingParams
from kvscope.engine.kvcache.storage import KVStorage
from kvscope.engine.models.base import KVGroup, ModelSpec
from kvscope.engine.sampling.sampler import Sampler, SampleRow
from kvscope.engine.scheduling.batch import Batch
from kvscope.kernels import ops

VOCAB = 97
REFERENCE = ops.resolve("reference")


class FakeModel:
    """A KV group of one layer for each of `windows` (0: sees everything). Set `fault` to an exception to raise, or `broken_rows` to the logits
    rows that get NaN, in the next step only."""

    def __init__(self, windows: Sequence[int] = (0,), vocab_size: int = VOCAB):
        self.windows = windows
        self.spec = ModelSpec(
            name="fake",
            architecture="Fake",
            num_layers=len(windows),
            hidden_size=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            vocab_size=vocab_size,
            max_model_len=4096,
            kv_groups=tuple(
                KVGroup((g,), num_kv_heads=1, head_dim=1, window=window) for g, window in enumerate(windows)
            ),
            dtype=torch.float32,
            device=torch.device("cpu"),
            eos_token_ids=frozenset(),
            num_parameters=0,
            weight_bytes=0,
            tied_embeddings=False,
        )
        self.fault: BaseException | None = None
        self.broken_rows: Sequence[int] = ()
        self.num_calls = 0

    def forward(self, batch: Batch, storage: KVStorage) -> torch.Tensor:
        self.num_calls += 1
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        sources, targets = torch.cat(batch.copies).unbind(1)
        assert len(targets.unique()) == len(targets) and not np.isin(sources, targets).any(), (
            "copies depend on their order"
        )
        for group, slots in enumerate(batch.slot_mapping):
            size = storage.groups[group].block_size
            owned = [slot for slot in slots.tolist() if slot >= size]  # the null block is padding's
            assert len(set(owned)) == len(owned), "two tokens of a step share a slot"
            block, offset = np.divmod(slots.numpy(), size)
            tokens, positions = rows_of(storage, group)
            tokens[block, offset], positions[block, offset] = batch.input_ids, batch.positions
        ends = batch.query_start_loc.numpy()[1:] - 1
        rows = np.searchsorted(ends, batch.logits_indices.numpy())
        logits = np.empty((len(rows), self.spec.vocab_size), np.float32)
        for s, (row, token) in enumerate(zip(rows, batch.logits_indices.tolist(), strict=True)):
            histories = [
                read_back(storage, group, table[row].numpy(), int(batch.positions[token]) + 1)[-window:]
                for group, (table, window) in enumerate(zip(batch.block_tables, self.windows, strict=True))
            ]
            logits[s] = logits_of(histories, self.spec.vocab_size)
        broken, self.broken_rows = self.broken_rows, ()
        for s in broken:
            logits[s % len(logits)] = np.nan
        return torch.from_numpy(logits)


def rows_of(storage: KVStorage, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """The layer's token ids and positions, views of its pages: float32 [num_blocks, block_size] each."""
    pages, layout = storage.pages(layer)
    half = layout.half_bytes
    return pages[:, :half].view(torch.float32).numpy(), pages[:, half : 2 * half].view(torch.float32).numpy()


def read_back(storage: KVStorage, layer: int, block_ids: Sequence[int], length: int) -> np.ndarray:
    """(token id, position) of the first `length` tokens of a block table: int64 [length, 2]."""
    tokens, positions = rows_of(storage, layer)
    rows = np.stack([tokens[block_ids].reshape(-1), positions[block_ids].reshape(-1)], axis=1)
    with np.errstate(invalid="ignore"):  # NaN in a page is a wrong history, not a warning
        return rows[:length].astype(np.int64)


def logits_of(histories: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """Pseudo-random logits of (token, position) rows, int64 [length, 2] a group; order matters."""
    state = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for history in histories:
            mixed = (history[:, 0].astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
            mixed ^= (history[:, 1].astype(np.uint64) + np.uint64(7)) * np.uint64(0x94D049BB133111EB)
            mixed *= mixed | np.uint64(1)
            state = (state ^ mixed.sum(dtype=np.uint64)) * np.uint64(0xD6E8FEB86659FD93)
        words = (np.arange(1, vocab_size + 1, dtype=np.uint64) * state) ^ (state >> np.uint64(29))
        words *= np.uint64(0xFF51AFD7ED558CCD)
    return ((words >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)) * 8


def reference(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    max_tokens: int | None = None,
    request_id: int = 0,
    child: int = 0,
    windows: Sequence[int] = (0,),
    eos_token_ids: Sequence[int] = (),
) -> list[int]:
    """What a sample must be, token by token from its own text alone: whatever the blocks, chunks, cache hits,
    preemptions and batch mates. `max_tokens` stands in for params.max_tokens where that is None."""
    sampler, tokens, output = Sampler(REFERENCE, VOCAB, seed=0), list(prompt), []
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    masked = tuple({*params.stop_token_ids, *eos_token_ids})
    while len(output) < (params.max_tokens or max_tokens):
        history = np.stack([np.array(tokens), np.arange(len(tokens))], axis=1)
        logits = torch.from_numpy(logits_of([history[-window:] for window in windows], VOCAB))[None]
        too_early = len(output) < params.min_tokens
        row = SampleRow(0, params, request_id, child, len(output), masked if too_early else (), tokens)
        output += sampler.sample(logits, [row]).token_ids
        tokens.append(output[-1])
        if output[-1] in ends:
            break
    return output


def make_core(
    *, windows: Sequence[int] = (0,), eos_token_ids: Sequence[int] = (), events: EventLog | None = None, **options
) -> EngineCore:
    """A core over the fake model; options are EngineConfig's, with small defaults."""
    defaults = {"block_size": 4, "num_blocks": 17, "max_model_len": 1000, "watermark": 0.0}
    config = EngineConfig(**(defaults | options))
    model = FakeModel(windows)
    storage = KVStorage(
        model.spec.kv_groups,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        dtype=torch.float32,
        device="cpu",
        kernels=REFERENCE,
        num_cpu_blocks=config.num_cpu_blocks,
    )
    return EngineCore(model, storage, config, eos_token_ids=eos_token_ids, events=events)


def greedy(max_tokens: int | None = 8, **options) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def run(core: EngineCore, max_steps: int = 10_000) -> list:
    """Step until nothing is left, checking integrity each time; the outputs of the steps."""
    outputs = []
    while core.has_work:
        outputs.append(core.step())
        core.check_integrity()
        assert len(outputs) < max_steps, "the engine does not come to an end"
    return outputs
