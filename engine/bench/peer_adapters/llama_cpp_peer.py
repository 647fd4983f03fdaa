"""llama.cpp through llama-cpp-python's C interface; the batches are made here, as its own server makes them.

A step takes one token of every sequence that has its prompt computed, and prompt tokens up to the step's budget.
"""

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from llama_gguf import converted
from open_loop import open_loop

BUDGET = 512  # tokens a step; its n_ubatch
SEQUENCES = 64  # the most that every build of llama.cpp has


class Sequence:
    """`tokens` are computed up to `done`."""

    def __init__(self, slot, prompt, new_tokens):
        self.slot = slot
        self.tokens = list(prompt)
        self.end = len(prompt) + new_tokens
        self.prompt_tokens = len(prompt)
        self.done = 0


class Peer:
    def __init__(
        self, *, model, dtype, quantization, threads, cache_tokens, cache_bytes, max_num_seqs, max_model_len, folder
    ):
        kind = {"int8": "Q8_0", None: {"bfloat16": "BF16", "float32": "F32"}[dtype]}[quantization]
        path = converted(Path(model), kind, Path(folder))
        self.sequences = min(max_num_seqs, SEQUENCES)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = self.sequences * (max_model_len + 1)
        options.n_batch = options.n_ubatch = BUDGET
        options.n_seq_max = self.sequences
        options.n_threads = options.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError(f"no context of {options.n_ctx} tokens for {self.sequences} sequences could be made")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BUDGET, 0, 1)
        self.running = {}
        self.waiting = []
        self.free = list(range(self.sequences))
        self.about = (
            f"llama.cpp in llama-cpp-python {llama_cpp.__version__}, {kind} weights, KV in f16, {threads} threads, "
            f"{self.sequences} sequences of {max_model_len + 1} tokens, {BUDGET} tokens a step, batches made by the adapter"
        )

    def generate(self, prompts, new_tokens):
        made = {i: [] for i in range(len(prompts))}
        for i, prompt in enumerate(prompts):
            self.waiting.append((i, prompt, new_tokens))
        while self.waiting or self.running:
            for i, sequence in self._step():
                if len(sequence.tokens) == sequence.end:
                    made[i] = sequence.tokens[sequence.prompt_tokens :]
        return list(made.values())

    def serve(self, jobs):
        def submit(i, prompt, new_tokens):
            self.waiting.append((i, prompt, new_tokens))

        def step():
            return {i: (1, len(sequence.tokens) == sequence.end) for i, sequence in self._step()}

        return open_loop(jobs, submit, step)

    def _step(self):
        """One step; those that got a token, as [(number, sequence)]."""
        while self.waiting and self.free:
            number, prompt, new_tokens = self.waiting.pop(0)
            self.running[number] = Sequence(self.free.pop(), prompt, new_tokens)
        self.batch.n_tokens = 0
        rows = []
        for number, sequence in sorted(self.running.items(), key=lambda item: len(item[1].tokens) - item[1].done):
            count = min(len(sequence.tokens) - sequence.done, BUDGET - self.batch.n_tokens)
            for position in range(sequence.done, sequence.done + count):
                self._append(sequence.tokens[position], position, sequence.slot)
            sequence.done += count
            if count and sequence.done == len(sequence.tokens):
                self.batch.logits[self.batch.n_tokens - 1] = 1
                rows.append((self.batch.n_tokens - 1, number, sequence))
        if status := llama_cpp.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode gave {status}")
        for row, number, sequence in rows:
            logits = llama_cpp.llama_get_logits_ith(self.context, row)
            values = np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab_size,))
            sequence.tokens.append(int(values.argmax()))
            if len(sequence.tokens) == sequence.end:
                llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), sequence.slot, -1, -1)
                self.free.append(sequence.slot)
                del self.running[number]
        return [(number, sequence) for _, number, sequence in rows]

    def _append(self, token, position, slot):
        batch, i = self.batch, self.batch.n_tokens
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, 0
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, slot
        batch.n_tokens += 1
