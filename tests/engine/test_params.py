"""Options of requests and engines: validated once, in a sentence that names the field, the value and the limit."""

import dataclasses

import numpy as np
import pytest
from kvscope.engine import EngineConfig, SamplingParams


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert params.max_tokens is None and params.seed is None and params.stop == () and not params.greedy
    assert SamplingParams(temperature=0).greedy
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.logit_bias is None and params.allowed_token_ids is None and params.bad_words == ()
    assert params.detokenize and params.spaces_between_special_tokens and params.prompt_logprobs is None
    assert not params.shapes_logits


def test_sequences_become_tuples_and_the_object_is_frozen():
    params = SamplingParams(stop="x", stop_token_ids=[1, 2])
    assert params.stop == ("x",) and params.stop_token_ids == (1, 2)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b") and SamplingParams(stop=None).stop == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    words = ["x y", [np.int64(3), 4]]
    assert (
        SamplingParams(bad_words=words).bad_words == ("x y", (3, 4)) and SamplingParams(bad_words=None).bad_words == ()
    )


def test_a_bias_is_copied_and_the_object_can_still_be_a_key():
    biases = {np.int64(3): 1}
    params = SamplingParams(logit_bias=biases, allowed_token_ids=[3])
    biases[4] = 5
    assert params.logit_bias == {3: 1.0} and params.allowed_token_ids == (3,)
    assert len({params, SamplingParams(logit_bias={3: 1.0}, allowed_token_ids=(3,))}) == 1
    assert params != SamplingParams(logit_bias={3: 2.0}, allowed_token_ids=[3])


def test_numpy_numbers_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3), seed=np.int64(7))
    assert (params.temperature, params.max_tokens, params.seed) == (0.5, 3, 7)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("n", 0, "an integer from 1 to 64"),
        ("n", 65, "an integer from 1 to 64"),
        ("n", 1.5, "an integer from 1 to 64"),
        ("n", True, "an integer from 1 to 64"),
        ("temperature", -0.1, "0 or more"),
        ("temperature", float("nan"), "0 or more"),
        ("temperature", float("inf"), "0 or more"),
        ("temperature", "hot", "0 or more"),
        ("temperature", 10**400, "0 or more"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_k", -2, "off"),
        ("top_k", 2.5, "off"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 1.1, "from 0 to 1"),
        ("seed", 1.5, "an integer or None"),
        ("max_tokens", 0, "1 or more"),
        ("max_tokens", 2.5, "1 or more"),
        ("max_tokens", True, "1 or more"),
        ("min_tokens", -1, "0 or more"),
        ("logprobs", -1, "from 0 to 20"),
        ("logprobs", 21, "from 0 to 20"),
        ("prompt_logprobs", 21, "from 0 to 20"),
        ("presence_penalty", -2.1, "from -2 to 2"),
        ("frequency_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", float("nan"), "from -2 to 2"),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", None, "above 0"),
        ("logit_bias", {3: 101}, "biases from -100 to 100"),
        ("logit_bias", {3: float("nan")}, "biases from -100 to 100"),
        ("logit_bias", {-3: 1}, "token ids, 0 or more"),
        ("logit_bias", [3], "a dict from token ids"),
        ("allowed_token_ids", [], "at least one token id"),
        ("allowed_token_ids", [-1], "a list of token ids"),
        ("bad_words", "word", "a list of words"),
        ("bad_words", ["", "x"], "words that are not blank"),
        ("bad_words", [" "], "words that are not blank"),
        ("bad_words", [[]], "a list of its token ids"),
        ("bad_words", [[-1]], "a list of its token ids"),
        ("detokenize", 1, "True or False"),
        ("spaces_between_special_tokens", None, "True or False"),
        ("stop", [""], "strings that are not empty"),
        ("stop", [3], "strings that are not empty"),
        ("stop_token_ids", [-1], "token ids"),
        ("stop_token_ids", ["a"], "token ids"),
        ("stop_token_ids", 7, "token ids"),
        ("ignore_eos", 1, "True or False"),
        ("skip_special_tokens", "no", "True or False"),
        ("include_stop_str_in_output", None, "True or False"),
    ],
)
def test_a_wrong_value_names_field_value_and_limit(field, value, limit):
    with pytest.raises(ValueError, match=rf"^{field}=.*{limit}"):
        SamplingParams(**{field: value})


def test_contradictions_name_both_sides():
    with pytest.raises(ValueError, match=r"min_tokens=5: must be at most max_tokens \(3\)"):
        SamplingParams(min_tokens=5, max_tokens=3)
    with pytest.raises(ValueError, match="n=2: must be 1 when temperature is 0"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(ValueError, match=r"stop=\('x',\): must be empty when detokenize is False"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("dtype", "int3", "must be one of 'auto', 'float32', 'bfloat16'"),
        ("device", "tpu", "must be one of 'auto', 'cpu', 'cuda'"),
        ("kernels", "fast", "must be one of"),
        ("scheduling_policy", "lifo", "must be one of 'fcfs'"),
        ("logprobs_mode", "raw", "must be one of 'raw_logprobs', 'processed_logprobs'"),
        ("block_size", 0, "an integer of at least 1"),
        ("block_size", "16", "an integer of at least 1"),
        ("num_blocks", 1, "an integer of at least 2"),
        ("max_num_seqs", True, "an integer of at least 1"),
        ("max_num_batched_tokens", 0, "an integer of at least 1"),
        ("max_model_len", 0, "an integer of at least 1"),
        ("num_threads", 0, "an integer of at least 1"),
        ("watermark", 1.0, "a share of the pool from 0 to below 1"),
        ("watermark", "low", "a share of the pool"),
        ("seed", 1.5, "must be an integer"),
        ("enable_prefix_caching", 1, "True or False"),
        ("cache_salt", "", "a string that is not empty"),
        ("tokenizer", 5, "a string that is not empty"),
    ],
)
def test_a_wrong_engine_option_names_itself(option, value, words):
    with pytest.raises(ValueError, match=rf"^{option}=.*{words}"):
        EngineConfig.from_options("default", {option: value})


def test_unknown_options_are_named_with_the_known_ones():
    with pytest.raises(
        TypeError, match=r"unknown option 'blocksize'; the options are .*block_size, cache_salt, device"
    ):
        EngineConfig.from_options("default", {"blocksize": 16})
    with pytest.raises(TypeError, match=r"unknown option 'weights_source'"):
        EngineConfig.from_options("default", {"weights_source": "x"})
    for name, value in (("cache_salt", "a"), ("prefix_cache", "radix"), ("eviction_policy", "lfu")):
        with pytest.raises(ValueError, match=f"{name}='{value}': needs enable_prefix_caching=True"):
            EngineConfig(**{name: value}, enable_prefix_caching=False)
    with pytest.raises(ValueError, match="model=None"):
        EngineConfig.from_options(None, {})
