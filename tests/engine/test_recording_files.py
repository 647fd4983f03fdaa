"""Files that are no recordings, or damaged ones, or made to do harm: one sentence each, and no memory taken for them."""

import json
import random
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from fake_model import greedy, make_core
from kvscope.engine import SamplingParams
from kvscope.engine.recording.recording import Recording
from kvscope.engine.recording.tape import Tape

PAGE = "recording.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small recording: (path, its members)."""
    core = make_core(num_blocks=12)
    tape = Tape(core)
    for seed in range(4):
        core.add_request([1, 2, 3, 4, seed], SamplingParams(n=2, temperature=1.0, max_tokens=9, ignore_eos=True))
    core.add_request([1] * 9, greedy(4))
    while core.has_work:
        core.step()
        tape.mark("running")
    path = tape.recording().save(tmp_path_factory.mktemp("recordings") / "whole.kvscope")
    with zipfile.ZipFile(path) as file:
        return path, {name: file.read(name) for name in file.namelist()}


def written(path, members, **options):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, **options) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def changed(whole, path, change):
    """The recording with its page changed by `change(page)`."""
    page = json.loads(whole[1][PAGE])
    change(page)
    return written(path, whole[1] | {PAGE: json.dumps(page)})


def refusal(path):
    with pytest.raises(ValueError) as caught:
        Recording.load(path)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path}: ") and "\n" not in sentence and len(sentence) < 300
    return sentence


def test_it_is_read_where_it_is_whole(whole):
    assert Recording.load(whole[0]).last_step > 10


def test_what_is_no_recording_is_told(whole, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        Recording.load(tmp_path / "nowhere.kvscope")
    path = tmp_path / "file"
    for content in (b"", b"hello", b"PK\x03\x04", bytes(10_000), b"\x93NUMPY\x01\x00"):
        path.write_bytes(content)
        assert "is no kvscope recording" in refusal(path)
    assert "is no kvscope recording" in refusal(written(path, {"word/document.xml": "<xml/>"}))
    assert "is no kvscope recording" in refusal(written(path, {PAGE: "[]"}))
    assert "is no kvscope recording" in refusal(changed(whole, path, lambda page: page.update(kind="a song")))
    assert "format 2, and this kvscope reads format 1" in refusal(
        changed(whole, path, lambda page: page.update(version=2))
    )
    assert "damaged" in refusal(written(path, {PAGE: "[" * 100_000}))


def test_a_file_that_is_cut_off_is_told(whole, tmp_path):
    data, path = whole[0].read_bytes(), tmp_path / "cut.kvscope"
    for size in np.linspace(0, len(data) - 1, 60).astype(int):
        path.write_bytes(data[:size])
        refusal(path)


def test_a_missing_or_shortened_member_is_told(whole, tmp_path):
    path = tmp_path / "part.kvscope"
    for name, data in whole[1].items():
        if name == PAGE:
            continue
        if data:
            assert "damaged" in refusal(written(path, whole[1] | {name: data[:-1]}))
        assert "damaged" in refusal(written(path, {n: d for n, d in whole[1].items() if n != name}))


def test_no_number_of_a_column_does_harm(whole, tmp_path):
    """Bytes changed at random: it is told that the file is damaged, or it reads as another recording, whole."""
    dice, path, told = random.Random(0), tmp_path / "odd.kvscope", 0
    columns = [name for name, data in whole[1].items() if data and name != PAGE]
    for _ in range(150):
        members = dict(whole[1])
        for name in dice.sample(columns, 3):
            data = bytearray(members[name])
            data[dice.randrange(len(data))] = dice.choice([0, 1, 127, 128, 255])
            members[name] = bytes(data)
        written(path, members)
        try:
            recording = Recording.load(path)
        except ValueError as error:
            assert str(error).startswith(f"{path}: this recording is damaged: ")
            told += 1
            continue
        for step in (recording.first_step, recording.last_step):
            recording.state_at(step)
            recording.events_until(step)
    assert told > 20


def test_nor_does_any_entry_of_its_page(whole, tmp_path):
    path = tmp_path / "odd.kvscope"

    def places(value, way=()):
        yield way
        items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
        for key, inner in items:
            yield from places(inner, (*way, key))

    page = json.loads(whole[1][PAGE])
    ways = [way for way in places(page) if way and way[0] not in ("config", "info")]
    for way in random.Random(0).sample(ways, 60):
        for odd in random.Random(str(way)).sample([None, -1, "x", [], {}, 10**30], 2):
            broken = json.loads(whole[1][PAGE])
            inside = broken
            for key in way[:-1]:
                inside = inside[key]
            inside[way[-1]] = odd
            written(path, {PAGE: json.dumps(broken)} | {n: d for n, d in whole[1].items() if n != PAGE})
            try:
                recording = Recording.load(path)
            except ValueError as error:
                assert str(error).startswith(f"{path}: ")
                continue
            recording.state_at(recording.last_step)
            recording.at(recording.last_step).handles()


def test_what_a_file_claims_takes_no_memory(whole, tmp_path):
    path = tmp_path / "large.kvscope"

    def claims(page):
        page["arrays"]["table/blocks"][1] = 10**12

    bomb = written(tmp_path / "bomb.kvscope", whole[1] | {"table/fills/0": bytes(300 << 20)}, compresslevel=9)
    lying = bytearray(whole[0].read_bytes())
    at = lying.rfind(b"PK\x01\x02")  # its last member claims 4 GB
    lying[at + 24 : at + 28] = struct.pack("<I", 2**32 - 2)
    (tmp_path / "lying.kvscope").write_bytes(lying)
    tracemalloc.start()
    try:
        for name, value in (("num_blocks", 10**15), ("num_groups", 10**9), ("block_size", -3)):
            sentence = refusal(changed(whole, path, lambda page, n=name, v=value: page["facts"].update({n: v})))
            assert "claims" in sentence
        assert "claims 1000000000000 rows" in refusal(changed(whole, path, claims))
        assert "more than 256 MB" in refusal(bomb)
        assert "more than 256 MB" in refusal(tmp_path / "lying.kvscope")
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
