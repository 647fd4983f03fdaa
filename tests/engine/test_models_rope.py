"""Rotary tables against transformers', far out too: a dropped scaling is exact at position 0 and shows only there."""

import pytest
import torch
from kvscope.engine.models.rope import ROPE_TYPES, RotaryTable, longest_sequence, rope_type_of
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

DIM = 64
PARAMETERS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn, fractional ramp": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "beta_fast": 24, "beta_slow": 2,
        "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.2,
    },
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "longrope": {
        "short_factor": [1.0 + 0.01 * i for i in range(DIM // 2)],
        "long_factor": [1.0 + 0.3 * i for i in range(DIM // 2)],
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


@pytest.mark.parametrize("positions", [[0, 1], [0, 1, 8191, 8192, 32767]], ids=["short", "long"])
@pytest.mark.parametrize("max_position", [8192, 32768])
@pytest.mark.parametrize("kind", PARAMETERS)
def test_table_equals_transformers(kind, max_position, positions):
    rope = {"rope_type": kind, "rope_theta": 10000.0, **PARAMETERS[kind]}
    config = LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, max_position_embeddings=max_position, rope_parameters=rope
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([positions]))
    expected = torch.cat((cos[0, :, : DIM // 2], sin[0, :, : DIM // 2]), dim=-1)

    length = positions[-1] + 1
    table = RotaryTable(config.rope_parameters, rot_dim=DIM, max_position=max_position, seq_len=length)
    torch.testing.assert_close(table.upto(length)[positions], expected, rtol=0, atol=2.4e-7)


def test_every_known_kind_is_compared():
    assert {kind.split(",")[0] for kind in PARAMETERS} == set(ROPE_TYPES)


def test_the_older_key_is_read():
    assert rope_type_of({"type": "linear", "factor": 2.0, "rope_theta": 1e4}) == "linear"


def test_unknown_kind_is_an_error():
    with pytest.raises(ValueError, match="rope_type='helical': the known rotary embeddings are default, linear"):
        RotaryTable({"rope_type": "helical", "rope_theta": 1e4}, rot_dim=8, max_position=64)


def test_missing_parameter_is_named():
    with pytest.raises(ValueError, match="rope type 'llama3' needs 'low_freq_factor'"):
        rope_type_of({"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0})


def test_longrope_factors_of_another_head_size_are_refused():
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, **PARAMETERS["longrope"]}
    with pytest.raises(ValueError, match="short_factor of rope type 'longrope' has 32 entries; rotating 48 needs 24"):
        RotaryTable(parameters, rot_dim=48, max_position=8192)


def test_table_grows_only_as_far_as_sequences_reach():
    table = RotaryTable({"rope_type": "default", "rope_theta": 1e4}, rot_dim=8, max_position=131072)
    first = table.upto(10)
    assert len(first) == RotaryTable.FIRST_ROWS
    grown = table.upto(len(first) + 1)
    assert len(grown) == 2 * len(first)
    assert torch.equal(grown[: len(first)], first)
    assert table.upto(5) is grown


@pytest.mark.parametrize(
    ("kind", "longest"),
    [("default", 8192), ("linear", 32768), ("dynamic", 8192), ("yarn", 16384), ("llama3", 8192), ("longrope", 4096)],
)
def test_longest_sequence_that_one_set_of_frequencies_serves(kind, longest):
    assert longest_sequence({"rope_type": kind, "rope_theta": 1e4, **PARAMETERS[kind]}, 8192) == longest
