"""Log-probabilities of the prompt are whole on every path through the scheduler: chunks, preemption, forks, a full cache."""

import numpy as np
import pytest
import torch
from fake_model import greedy, logits_of, make_core, reference, run
from kvscope.engine import EventKind, SamplingParams


@pytest.mark.parametrize("after", range(5))
@pytest.mark.parametrize("windows", [(0,), (0, 0), (3, 0)])
def test_prompt_logprobs_survive_chunks_preemption_forks_and_a_full_cache(after, windows):
    core = make_core(windows=windows, num_blocks=60 * len(windows), max_num_batched_tokens=6)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    core.add_request(prompt, greedy(3))
    run(core)
    asked = SamplingParams(n=3, seed=1, max_tokens=5, prompt_logprobs=4)
    for params in (asked, greedy(5, prompt_logprobs=0), greedy(5)):
        core.add_request(prompt, params)
    for _ in range(after):
        core.step()
    for request_id in (2, 3, 4):
        core.preempt(request_id)
    run(core)
    history = np.stack([np.array(prompt), np.arange(len(prompt))], axis=1)
    for request_id, count in ((2, 4), (3, 0)):
        first, *entries = core.get(request_id).prompt_logprobs
        assert first is None and len(entries) == len(prompt) - 1
        for i, entry in enumerate(entries, 1):
            logits = torch.from_numpy(logits_of([history[:i][-w:] for w in windows], 97))
            expected = logits.log_softmax(-1)
            assert list(entry)[:count] == expected.topk(count).indices.tolist() and prompt[i] in entry
            assert all(value == pytest.approx(float(expected[t]), abs=1e-5) for t, value in entry.items())
        assert core.get(request_id).num_cached_tokens == 0
    assert core.get(4).prompt_logprobs is None and core.get(4).num_cached_tokens == 8
    for child in core.get(2).children:
        expected = reference(prompt, asked, request_id=2, child=child.child, windows=windows)
        assert child.output_token_ids == expected


def test_a_request_that_does_not_read_the_cache_counts_neither_hit_nor_miss():
    core = make_core()
    core.add_request([1, 2, 3, 4, 5], greedy(2))
    run(core)
    before = core.metrics()
    core.add_request([1, 2, 3, 4, 5], greedy(2, prompt_logprobs=1))
    run(core)
    kinds = [e.kind for e in core.events.since(0)[0] if e.request_id == 2]
    assert EventKind.CACHE_HIT not in kinds and EventKind.CACHE_MISS not in kinds
    name = "vllm:prefix_cache_queries_total"
    assert core.metrics()[name] == before[name]
