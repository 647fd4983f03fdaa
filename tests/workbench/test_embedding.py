"""A workbench inside somebody's own Panel app: several viewers on one, each over a websocket as a browser's is."""

import socket
import time

import panel as pn
import pytest
from bokeh.client import pull_session
from bokeh.models import Div
from kvscope.engine import Engine
from kvscope.workbench import Workbench, compare


@pytest.fixture
def serve():
    servers = []

    def start(make):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        servers.append(pn.serve(make, port=port, show=False, threaded=True))
        return f"http://localhost:{port}"

    yield start
    for server in servers:
        server.stop()


def connect(url):
    end = time.monotonic() + 30
    while True:  # the server listens on a thread of its own, some time from now
        try:
            return pull_session(url=url)
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.1)


def texts(session):
    return " ".join(div.text for div in session.document.select({"type": Div}))


def test_two_viewers_of_one_workbench_in_a_template_of_ones_own(tiny_folder, serve):
    with Engine(str(tiny_folder), num_blocks=64, dtype="float32", num_threads=1) as engine, Workbench(engine) as wb:

        def page():
            template = pn.template.VanillaTemplate(title="My course")
            template.main.append(pn.Row(wb))
            return template

        url = serve(page)
        first = connect(url)
        assert "Nothing is running yet" in texts(first)
        first.close()
        wb.submit([5, 6, 7], max_tokens=4, ignore_eos=True).result(30)
        second = connect(url)
        assert "step <b>4</b>" in texts(second), "whoever comes later sees what is there"
        second.close()
        assert not wb.closed and engine.state == "running", "a viewer that leaves ends nothing"


def test_pages_outside_of_any_session_are_drawn_once(tiny_folder):
    with compare({}, {"block_size": 8}, model=str(tiny_folder), num_blocks=33, dtype="float32", num_threads=1) as cmp:
        wb = Workbench(cmp.sides[0].engine)
        pages = wb.servable(title="mine"), pn.panel(cmp), pn.Column("# Text", cmp)[1]
        told = [" ".join(div.text for div in page.object.select({"type": Div})) for page in pages]
        assert "KV block pool" in told[0]
        assert all("The same requests, side by side" in text for text in told[1:])
        wb.close()
