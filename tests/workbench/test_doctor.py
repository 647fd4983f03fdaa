"""`kvscope doctor`: every check says something, and the known bad combinations are found when they are there."""

import sys

import pytest
from kvscope.workbench import doctor


def marks(check):
    return [mark for mark, _ in doctor._run(check)]


def told(check):
    return "\n".join(f"{mark} {text}" for mark, text in doctor._run(check))


def test_the_report_has_every_part_and_no_check_fails_itself():
    report = doctor.report()
    assert all(f"\n{title}\n" in report for title in doctor.CHECKS)
    assert "could not be looked at" not in report
    for package in ("torch", "jupyter_bokeh", "llguidance"):
        assert package in report
    assert "threads" in report and "memory free" in report and "default model" in report


@pytest.mark.parametrize("check", doctor.CHECKS.values(), ids=list(doctor.CHECKS))
def test_every_check_finds_something(check):
    assert marks(check) and set(marks(check)) <= {"ok", "--", "!!"}


def test_a_check_that_fails_stops_no_other():
    def broken():
        yield doctor.Finding("ok", "so far")
        raise OSError("gone")

    assert told(broken) == "ok so far\n!! this could not be looked at: OSError: gone"


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"panel": "1.10.0"}, "pip install 'panel==1.9.*'"),
        ({"bokeh": "4.0.0"}, "bokeh 4.0.0: tested with 3.9"),
        ({"jupyterlab": "4.3.9"}, "JupyterLab before 4.4"),
        ({"ipykernel": "6.30.1"}, "ipykernel before 7"),
        ({"jupyter_bokeh": "4.0.5"}, "jupyter_bokeh before 4.1"),
    ],
)
def test_bad_versions_are_named(monkeypatch, versions, says):
    good = {"panel": "1.9.2", "bokeh": "3.9.4", "jupyterlab": "4.6.0", "ipykernel": "7.4.0", "jupyter_bokeh": "4.1.0"}
    monkeypatch.setattr(doctor, "version", lambda name: (good | versions).get(name, ""))
    assert says in told(doctor.combinations)
    monkeypatch.setattr(doctor, "version", lambda name: good.get(name, ""))
    assert says not in told(doctor.combinations)


def test_bad_surroundings_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nest_asyncio", sys)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert "nest_asyncio is loaded" in told(doctor.combinations)
    assert "NUMBA_DISABLE_JIT=1" in told(doctor.combinations)


def test_the_host_is_told(monkeypatch):
    monkeypatch.setenv("VSCODE_PID", "1")
    assert doctor.host().startswith("VS Code")
    monkeypatch.setitem(sys.modules, "google.colab", sys)
    assert doctor.host().startswith("Colab")


def test_what_is_missing_comes_with_what_to_do(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    screen = told(doctor.screen)
    assert "pip install jupyter_bokeh" in screen and 'pip install "kvscope[lab]"' in screen and "no Chromium" in screen
