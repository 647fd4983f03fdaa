"""Benchmarks' files become pictures: every table has its chart, and a bar is as long as its number."""

import importlib
import json

import pytest
from kvscope.workbench.bench_plot import CHARTS, draw
from kvscope.workbench.bench_views import HEADERS, Measured, table
from kvscope.workbench.cli import main


def write(folder, title, rows):
    file = folder / "figures.json"
    file.write_text(json.dumps({"title": title, "machine": "this one", "rows": rows}))
    return file


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_names_columns_that_its_benchmark_has(name):
    module = "kvscope.workbench.bench_views" if name == "views" else f"kvscope.engine.bench.{name}"
    headers = set(importlib.import_module(module).HEADERS)
    chart = CHARTS[name]
    assert {*chart.groups, *chart.bars, *filter(None, [chart.name, chart.of[0]])} <= headers


def test_every_row_has_its_bars_and_what_has_no_number_has_none(tmp_path, capsys):
    rows = [
        {"operation": "linear", "shape": "1 × 2", "reference µs": 8.0, "cpu µs": 2.0, "torch µs": 4.0},
        {"operation": "rotary", "shape": "3 × 2", "reference µs": 9.0, "cpu µs": 1.0, "torch µs": "–"},
    ]
    file = write(tmp_path, "kvscope bench kernels", rows)
    (axes,) = draw(file).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["linear, 1 × 2", "rotary, 3 × 2"]
    assert sorted(bar.get_width() for bar in axes.patches) == [1, 2, 4, 8, 9]
    assert main(["bench", "plot", str(file), "--format", "png"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "figures.png")
    assert (tmp_path / "figures.png").read_bytes()[:4] == b"\x89PNG"


def test_where_a_row_is_one_contender_its_name_is_the_bar(tmp_path):
    rows = [
        {"load": "decode", "shape": "4 × 128", "engine": engine, "tok/s": speed}
        for engine, speed in (("kvscope", 600.0), ("vllm", 200.0))
    ]
    figure = draw(write(tmp_path, "kvscope bench peers", rows))
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["decode, 4 × 128"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["kvscope", "vllm"]


def test_of_the_views_the_bytes_of_each_are_drawn_a_bar_for_each_pool(tmp_path):
    measured = Measured(seconds=10, steps=500, cpu=dict.fromkeys(("events", "views"), 0.1), views=["block_map"])
    measured.frames = [{"block_map": 2430, "page": 50}] * 80
    rows = [
        dict(zip(HEADERS, [blocks, *row], strict=True)) for blocks in (128, 16384) for row in table(measured, blocks)
    ]
    figure = draw(write(tmp_path, "kvscope bench views", rows))
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["bytes: block_map", "bytes: page", "bytes: all"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["128 blocks", "16,384 blocks"]
    assert {"2,430", "50", "2,480"} <= {text.get_text() for text in axes.texts}, "no exponents"


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"title": "a book", "rows": []}', '{"title": "kvscope bench peers", "rows": [{}]}']
)
def test_a_file_that_no_benchmark_wrote_is_one_sentence(tmp_path, capsys, text):
    (tmp_path / "x.json").write_text(text)
    assert main(["bench", "plot", str(tmp_path / "x.json")]) == 1
    error = capsys.readouterr().err
    assert "x.json is not what a benchmark wrote with --json" in error and error.count("\n") == 1
