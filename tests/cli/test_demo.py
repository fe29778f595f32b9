"""`lit-het demo`: its page as a simulated user and as a real browser see it."""

import asyncio
import contextlib
import dataclasses
import http.client
import re
import shutil
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from lit_het.apps.demo import model as demo_model
from lit_het.apps.demo import server as demo
from lit_het.calibrations import Calibration, FittedTemperature
from lit_het.eval.answers import answer, label_predictor
from tests.cli.browser import assert_fits_and_contacts_no_other_machine, browser, served
from tests.cli.conftest import refusal
from tests.cli.tiny_decoder import NAMES

LABELS = ", ".join(NAMES[:4])


@pytest.fixture
def image(tmp_path):
    Image.new("RGB", (40, 30), (255, 0, 0)).save(tmp_path / "red.png")
    return tmp_path / "red.png"


@pytest.fixture(scope="session")
def captions(tmp_path_factory):
    path = tmp_path_factory.mktemp("captions") / "captions.txt"
    path.write_text("\n".join(NAMES))
    return path


@pytest.fixture(scope="session")
def model(trained_lit, captions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    # What other tests evaluated of the run would be shown.
    without_records = shutil.ignore_patterns("evaluations")
    run_dir = shutil.copytree(trained_lit.run_dir, folder / "run", ignore=without_records)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return demo.open_model(run_dir, str(captions))


def test_a_page_gets_the_predictions_of_classify(model, image):
    square, features = model.see(image.read_bytes(), "red.png")
    size = model.run.config.data.image_size
    assert square.shape == (size, size, 3)
    labels, found, remarks = model.answer(features, LABELS, "photo", 16, 3)
    assert remarks == "which names were in the training captions is not known", "the run is not calibrated"
    assert labels == tuple(NAMES[:4])
    expected = answer(label_predictor(model.run.model(), labels, ["a photo of a {c}."]), features, 16, 3)
    assert found.samples is not None
    assert expected.samples is not None
    np.testing.assert_allclose(found.samples, expected.samples, rtol=1e-5)
    assert model.noise(features) == (pytest.approx(expected.noise_norm), [])
    nearest = model.nearest(features)
    assert sorted(caption for caption, _ in nearest) == sorted(NAMES)
    assert [score for _, score in nearest] == sorted((score for _, score in nearest), reverse=True)


def test_a_page_begins_with_as_many_samples_as_the_temperature_was_fitted_for(model):
    fits = (FittedTemperature(value, 0.1, 1.0, 0.9) for value in (0.5, 0.6))
    calibration = Calibration(("x",), "", "", 100, 8, 24, *fits)
    calibrated = demo_model.DemoModel(model.run, dataclasses.replace(model.run.model(), calibration=calibration), None)
    assert (model.samples, calibrated.samples) == (32, 24)


def test_one_image_is_decoded_at_a_time(model, image, monkeypatch):
    inside, most, real = [], [], demo_model.decode

    def noted(*arguments):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return real(*arguments)

    monkeypatch.setattr(demo_model, "decode", noted)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: model.see(image.read_bytes(), "red.png"), range(8)))
    assert most == [1] * 8


def ui():
    """The elements of pages; skips a test where they are not installed."""
    return pytest.importorskip("nicegui").ui


def visit(model, script):
    """Runs a script as a user of the page."""
    testing = pytest.importorskip("nicegui.testing")
    from lit_het.apps.demo.page import show

    async def simulate():
        async with testing.user_simulation(root=lambda: show(model)) as user:
            await user.open("/")
            await script(user)

    asyncio.run(simulate())


async def drop(user, data, name="image.png"):
    upload = ui().upload
    [element] = user.find(upload).elements
    await element.handle_uploads([upload.SmallFileUpload(name, "image/png", data)])


async def write(user, labels):
    with user:
        [element] = user.find(ui().textarea).elements
        element.value = labels


def test_a_user_drops_an_image_writes_labels_and_draws_again(model, image):
    async def script(user):
        await user.should_see("Drop an image and write two labels or more.")
        await drop(user, image.read_bytes())
        await user.should_see("Nearest captions", retries=100)
        await user.should_see("Write two labels or more.")
        await write(user, LABELS)
        await user.should_see("with noise", retries=100)
        await user.should_see("50%")  # the end of the axis
        before = [label.text for label in user.find("with noise").elements]
        user.find("Draw again").click()
        for _ in range(100):
            await asyncio.sleep(0.1)
            if before != [label.text for label in user.find("with noise").elements]:
                return
        raise AssertionError("the same noise was drawn again")

    visit(model, script)


def test_mistakes_are_messages_on_the_page(model, image):
    async def script(user):
        await drop(user, b"no image at all", "text.png")
        await user.should_see("text.png: not an image", retries=100)
        await drop(user, image.read_bytes())
        await user.should_not_see("text.png: not an image", retries=100)
        await write(user, "a cat")
        await user.should_see("'a cat' is the only label", retries=100)
        await write(user, "a cat,a cat")
        await user.should_see("'a cat' is repeated", retries=100)
        await write(user, " ")
        await user.should_not_see("is repeated", retries=100)

    visit(model, script)


def answered(address, method="GET", path="/", body=None, **headers):
    """The status and the text that a server answers with."""
    connection = http.client.HTTPConnection(address, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.read().decode()


def wait_for(address):
    """Returns when a server accepts connections; it names its address a moment before."""
    host, port = address.split(":")
    for _ in range(600):
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port))):
            return
        time.sleep(0.1)
    raise AssertionError(f"no answer from {address}")


def form(data):
    head = b'--b\r\nContent-Disposition: form-data; name="f"; filename="x.png"\r\nContent-Type: image/png\r\n\r\n'
    return head + data + b"\r\n--b--\r\n"


def sent_before_the_end(address, path):
    """How many bytes a server takes of a form of 300 MB whose length it is not told, until it closes the connection."""
    host, port = address.split(":")
    head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nTransfer-Encoding: chunked\r\n"
    count, block = 0, form(bytes(2**20))[: 2**20]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):
            while count < 300 * 2**20:
                connection.sendall(f"{len(block):x}\r\n".encode() + block + b"\r\n")
                count, block = count + len(block), bytes(2**20)
    return count


@pytest.mark.slow
def test_a_server_answers_only_its_own_page_and_limits_uploads(trained_lit, image, tmp_path, monkeypatch):
    pytest.importorskip("nicegui")
    websockets = pytest.importorskip("websockets.sync.client")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with served("--checkpoint", trained_lit.run_dir, "--allow-host", "gpu-box") as url:
        address = url.removeprefix("http://")
        wait_for(address)
        status, page = answered(address)
        assert status == 200
        assert answered(address, Host="gpu-box:7860", Origin="http://gpu-box:7860")[0] == 200
        status, text = answered(address, Host="evil.example:7860")
        assert (status, "--allow-host evil.example" in text) == (403, True)
        assert answered(address, Origin="http://evil.example")[0] == 403

        socket_path = f"ws://{address}/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
        with websockets.connect(socket_path, origin=url) as connection:
            assert connection.recv().startswith("0{")
        for wrong in ({"origin": "http://evil.example"}, {"additional_headers": {"Origin": "null"}}):
            with pytest.raises(Exception, match="HTTP 403"):
                websockets.connect(socket_path, **wrong)

        (upload,) = set(re.findall(r"/_nicegui/client/[\w-]+/upload/\d+", page))
        kind = "multipart/form-data; boundary=b"
        assert answered(address, "POST", upload, form(image.read_bytes()), Content_Type=kind)[0] == 200
        assert answered(address, "POST", upload, Content_Length=str(300 * 2**20), Content_Type=kind)[0] == 413
        assert sent_before_the_end(address, upload) < 100 * 2**20
        assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 2**20  # nothing is left
        assert answered(address)[0] == 200


@pytest.mark.slow
def test_a_browser_shows_bands_and_contacts_no_other_machine(trained_lit, captions, image, tmp_path, monkeypatch):
    pytest.importorskip("nicegui")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with (
        browser(tmp_path / "profile") as page,
        served("--checkpoint", trained_lit.run_dir, "--captions", captions) as address,
    ):
        page.look(1100, 800)
        page.open(address)
        page.wait_for("Drop an image")
        page.choose_file(image)
        page.wait_for("Nearest captions")
        page.write("textarea", "\n".join(["<b>bold</b>", *NAMES[:3]]))
        page.wait_for("with noise")
        page.wait_for("<b>bold</b>")  # labels are never markup
        assert page.run("document.querySelectorAll('rect.band').length") == 4
        assert_fits_and_contacts_no_other_machine(page, address, tmp_path)


def test_without_the_extra_one_line_names_it(capsys, monkeypatch, trained_lit):
    monkeypatch.setitem(sys.modules, "nicegui", None)
    monkeypatch.delitem(sys.modules, "lit_het.apps.demo.page", raising=False)
    assert "pip install 'lit-het[demo]'" in refusal(capsys, "demo", "--checkpoint", trained_lit.run_dir)


@pytest.mark.parametrize("problem", ["classifier", "captions", "host"])
def test_runs_that_cannot_be_served_are_a_one_line_error(capsys, trained_lit, upstream, tmp_path, problem):
    pytest.importorskip("nicegui")
    run, flags, message = {
        "classifier": (upstream, (), "is a classifier; the demo needs a run with a text tower, or a decoder"),
        "captions": (trained_lit.run_dir, ("--captions", tmp_path / "none.txt"), "none.txt"),
        "host": (trained_lit.run_dir, ("--host", "256.0.0.1"), "--host 256.0.0.1"),
    }[problem]
    assert message in refusal(capsys, "demo", "--checkpoint", run, *flags)


def test_a_port_that_is_taken_is_refused_where_asked_for_and_else_another_is_found(capsys, trained_lit, monkeypatch):
    pytest.importorskip("nicegui")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refusal(capsys, "demo", "--checkpoint", trained_lit.run_dir, "--port", port)
        assert f"--port {port}" in line
        monkeypatch.setattr(demo, "_PORT", port)
        served_at = []
        monkeypatch.setattr("lit_het.apps.demo.page.serve", lambda _, host, port, allow_hosts: served_at.append(port))
        demo.demo(trained_lit.run_dir, None, "127.0.0.1", None)
        assert served_at[0] not in (0, port)
