"""What tests of beam searches share: their parameters, and what they must find, from the texts alone."""

import numpy as np
import pytest
import torch
from fake_model import VOCAB, logits_of
from kvscope.engine import BeamSearchParams
from kvscope.engine.sampling.beam_search import BeamSearch

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def search(width=4, max_tokens=12, **options):
    return BeamSearchParams(beam_width=width, max_tokens=max_tokens, **options)


def alone(prompt, params, max_tokens=None, *, windows=(0,), eos_token_ids=()):
    """What the search must find, from the texts alone: [(ids, logprob)], best first."""
    beams = BeamSearch(params, params.max_tokens or max_tokens, frozenset(eos_token_ids))
    texts = [list(prompt)]
    while not beams.done:
        histories = [np.stack([np.array(text), np.arange(len(text))], axis=1) for text in texts]
        logits = np.stack([logits_of([history[-window:] for window in windows], VOCAB) for history in histories])
        steps = beams.advance(beams.rank(torch.from_numpy(logits)), [text[len(prompt) :] for text in texts])
        texts = [[*texts[step.beam], step.token_id] for step in steps]
        beams.logprobs = [step.logprob for step in steps]
    return [(found.output, found.logprob) for found in beams.hypotheses]


def found(core, request_id):
    return [(child.output_token_ids, child.cumulative_logprob) for child in core.get(request_id).children]


def assert_same(ours, expected):
    assert [ids for ids, _ in ours] == [ids for ids, _ in expected]
    assert [p for _, p in ours] == pytest.approx([p for _, p in expected], abs=1e-4)
