"""Files that lie: each is one sentence that names the file, and no memory is taken for what it claims."""

import json
import shutil
import struct
import tracemalloc
from types import SimpleNamespace

import pytest
import torch
from gguf_files import write_gguf
from kvscope.engine.models import hub
from kvscope.engine.models.gguf import GGUFError, convert
from kvscope.engine.models.loader import load_model
from kvscope.engine.models.weight_files import INDEX, read_header
from kvscope.kernels import ops
from tiny import tiny_model

HUGE = 2**62


@pytest.fixture(autouse=True)
def nothing_absurd_is_allocated():
    """Of Python's and numpy's memory; torch raises by itself for what no machine has."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def load(folder):
    files = SimpleNamespace(folder=folder, name="tiny", source="a test")
    kernels = ops.resolve("reference", "cpu", torch.float32)
    return load_model(files, dtype=torch.float32, device="cpu", kernels=kernels)


# --- safetensors


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def safetensors(path, header, data=b"\0" * 16, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": tensor(shape=(4,), offsets=(0, HUGE))}, "gives a 4611686018427387904 bytes, and F32 [4] takes 16"),
        (
            {"a": tensor(shape=(HUGE, HUGE))},
            "gives a 8 bytes, and F32 [4611686018427387904, 4611686018427387904] takes",
        ),
        ({"a": tensor(shape=(3,))}, "gives a 8 bytes, and F32 [3] takes 12"),
        ({"a": tensor(shape=(8,), offsets=(0, 32))}, "is cut off"),
        ({"a": tensor(offsets=(1 << 40, (1 << 40) + 8))}, "is cut off"),
        ({"a": tensor(), "b": tensor(offsets=(4, 12))}, "puts a and b over each other"),
        ({"a": tensor(), "b": tensor()}, "puts a and b over each other"),
        ({"a": tensor(offsets=(8, 0))}, "describes a as"),
        ({"a": tensor(offsets=(-8, 0))}, "describes a as"),
        ({"a": tensor(shape=(-2,))}, "describes a as"),
        ({"a": tensor(shape=(2.0,))}, "describes a as"),
        ({"a": tensor(shape=(True,), offsets=(0, 4))}, "describes a as"),
        ({"a": tensor(offsets=(0, 8, 16))}, "describes a as"),
        ({"a": tensor(dtype=["F32"])}, "describes a as"),
        ({"a": [1, 2]}, "describes a as"),
        ({"a": {"dtype": "F32", "shape": 7, "data_offsets": [0, 8]}}, "describes a as"),
        ([tensor()], "is no table of tensors"),
        (b'{"a": ', "does not parse"),
        (b"\xff\xfe\xfd", "does not parse"),
        (b"[" * 100_000, "does not parse"),
    ],
)
def test_a_safetensors_header_that_cannot_be_true_is_one_sentence(tmp_path, header, message):
    file = safetensors(tmp_path / "model.safetensors", header)
    with pytest.raises(ValueError) as raised:
        read_header(file)
    assert message in str(raised.value) and str(raised.value).startswith(str(file))


@pytest.mark.parametrize("length", [2**64 - 1, HUGE, 10_000])
def test_a_header_longer_than_its_file_is_not_read(tmp_path, length):
    file = safetensors(tmp_path / "model.safetensors", {"a": tensor()}, length=length)
    with pytest.raises(ValueError, match="it ends inside its header"):
        read_header(file)


def test_a_header_of_gigabytes_is_not_read(tmp_path):
    file = safetensors(tmp_path / "model.safetensors", {}, length=1 << 31)
    with file.open("r+b") as sparse:
        sparse.truncate(1 << 32)
    with pytest.raises(ValueError, match=r"has a header of 2,147,483,648 bytes: at most 100,000,000 are read"):
        read_header(file)


def test_good_headers_stay_good(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "a": tensor(), "none": tensor(shape=(0, 4), offsets=(8, 8)),
              "odd": tensor("F8_E4M3", (8,), (8, 16))}  # fmt: skip
    entries = read_header(safetensors(tmp_path / "model.safetensors", header))
    assert {name: entry.stop - entry.start for name, entry in entries.items()} == {"a": 8, "none": 0, "odd": 8}


# --- folders


@pytest.fixture
def folder(tiny_folder, tmp_path):
    return shutil.copytree(tiny_folder, tmp_path / "model")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", "", 7])
def test_an_index_names_only_safetensors_of_its_own_folder(folder, name):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    for read in (load, hub.resolve):
        with pytest.raises(ValueError, match=r"names the shard .*: must be a \.safetensors file of the same folder"):
            read(folder)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": ["b"]}}])
def test_an_index_that_is_none_is_said(folder, index):
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is not an index of shards"):
        load(folder)


def test_a_tensor_in_two_shards_is_said(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    with pytest.raises(ValueError, match=r"holds .* twice: in a\.safetensors and b\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 2**40},
        {"intermediate_size": 2**40},
        {"vocab_size": 2**40},
        {"head_dim": 2**40},
        {"num_hidden_layers": 2**40},
        {"num_attention_heads": 2**40},
        {"num_hidden_layers": -1},
        {"hidden_size": -64},
        {"num_key_value_heads": 0},
        {"hidden_size": "64"},
    ],
)
def test_a_config_of_another_size_than_its_weights_is_said(folder, sizes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sizes))
    with pytest.raises(ValueError):
        load(folder)


@pytest.mark.parametrize("sizes", [{"n_inner": 2**34}, {"vocab_size": 2**26}, {"n_positions": 2**26}])
def test_a_config_far_larger_than_its_weights_is_refused_before_transformers_fills_the_memory(tmp_path, sizes):
    folder = tiny_model(tmp_path, "gpt2", tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sizes))
    with pytest.raises(ValueError, match=r"config\.json makes it [\d,]+ parameters, and its files hold 184,832"):
        load(folder)


# --- GGUF


def string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(*keys, tensors=(), num_tensors=None, num_keys=None, magic=b"GGUF", version=3):
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    return magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors) + b"\0" * 64


def key(name, kind, value):
    return string(name) + struct.pack("<I", kind) + value


def array(kind, count, values=b""):
    return struct.pack("<IQ", kind, count) + values


LLAMA = key("general.architecture", 8, string("llama"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gguf(num_keys=2**64 - 1), "cut short or damaged"),
        (gguf(num_tensors=2**64 - 1), "cut short or damaged"),
        (gguf(struct.pack("<Q", HUGE)), "cut short or damaged: its header describes 4,611,686,018,427,387,904 bytes"),
        (gguf(key("a", 8, struct.pack("<Q", HUGE))), "cut short or damaged"),
        (gguf(key("a", 9, array(0, HUGE))), "cut short or damaged"),
        (gguf(key("a", 9, array(8, HUGE))), "cut short or damaged"),
        (gguf(key("a", 9, array(9, 3))), "a value of kind 9"),
        (gguf(key("a", 99, b"")), "a value of kind 99"),
        (gguf(LLAMA, tensors=[string("t") + struct.pack("<I", 2**31)]), "a tensor of 2147483648 dimensions"),
        (gguf(LLAMA, tensors=[string("t") + struct.pack("<IQQIQ", 2, 2**32, 2**32, 0, 0)]), "cut short or damaged"),
        (gguf(LLAMA, tensors=[string("t") + struct.pack("<IQIQ", 1, 2**50, 0, 0)]), "cut short or damaged"),
        (gguf(LLAMA, tensors=[string("t") + struct.pack("<IQIQ", 1, 4, 0, 2**63)]), "cut short or damaged"),
        (gguf(LLAMA, tensors=[string("t") + struct.pack("<IQIQ", 1, 4, 9999, 0)]), "cut short or damaged"),
        (gguf(LLAMA, LLAMA), "damaged: Duplicate general.architecture"),
        (gguf(LLAMA, version=77), "cut short or damaged"),
        (gguf(magic=b"GGML"), "is not a GGUF file"),
        (b"GGUF", "cut short or damaged"),
        (gguf(LLAMA), "does not state llama.block_count"),
    ],
)
def test_a_gguf_header_that_cannot_be_true_is_one_sentence(tmp_path, content, message):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(GGUFError) as raised:
        convert(tmp_path / "bad.gguf", tmp_path, progress=False)
    assert message in str(raised.value) and str(raised.value).startswith("bad.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"block_count": 2**31 - 1}, "states 2147483647 blocks and holds 20 tensors"),
        (
            {"embedding_length": 2**32 - 1},
            "states embedding_length=4294967295: must be a number from 1 to 2,147,483,648",
        ),
        ({"attention.head_count": 0}, "states attention.head_count=0"),
        ({"rope.dimension_count": 0}, "describes no model that can be built"),
    ],
)
def test_a_gguf_file_of_absurd_sizes_is_one_sentence(tiny_folder, tmp_path, metadata, message):
    write_gguf(tiny_folder, tmp_path / "bad.gguf", metadata=metadata)
    with pytest.raises(GGUFError) as raised:
        convert(tmp_path / "bad.gguf", tmp_path, progress=False)
    assert message in str(raised.value) and str(raised.value).startswith("bad.gguf")
