"""`lit-het export --push`: what is uploaded, and the errors of a Hub that is a stand-in for the real one."""

import http.server
import threading
from types import SimpleNamespace

import huggingface_hub
import pytest

import lit_het
from tests.cli.conftest import last_line, run_command


def export(run_dir, folder, to="lit-het"):
    return ("export", "--checkpoint", run_dir, "--to", to, "--output", folder, "--push", "me/mine")


@pytest.fixture
def hub(monkeypatch):
    """Records the calls of a client of the Hub."""
    calls = []

    class Api:
        def create_repo(self, name, **options):
            calls.append(("create", name, options))

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            files = {path.name: path.read_bytes() for path in folder_path.iterdir()}
            calls.append(("upload", repo_id, files))
            return SimpleNamespace(commit_url="https://hub/me/mine/commit/1")

    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return calls


@pytest.mark.parametrize(("to", "library"), [("lit-het", "lit-het"), ("huggingface", "transformers")])
def test_a_folder_is_uploaded_with_its_model_card(capsys, hub, once_calibrated, tmp_path, to, library):
    run_command(*export(once_calibrated, tmp_path / "folder", to), "--licence", "apache-2.0")
    (_, created, options), (_, name, files) = hub
    assert (created, name, options) == ("me/mine", "me/mine", {"exist_ok": True})
    assert set(files) == {path.name for path in (tmp_path / "folder").iterdir()}
    assert {"config.json", "model.safetensors", "README.md"} <= set(files)
    card = huggingface_hub.ModelCard(files["README.md"].decode())
    fields = card.data.to_dict()
    assert (fields["license"], fields["library_name"]) == ("apache-2.0", library)
    assert fields["pipeline_tag"] == "zero-shot-image-classification"
    assert "# me/mine" in card.text
    assert "calibrated on" in card.text
    assert "https://hub/me/mine/commit/1" in capsys.readouterr().err


def test_a_model_is_uploaded_from_python_with_its_calibration(hub, once_calibrated):
    lit_het.load(once_calibrated).push_to_hub("me/mine")
    (_, created, _), (_, name, files) = hub
    assert created == name == "me/mine"
    assert {"model.safetensors", "config.json", "README.md", "calibration.json"} <= set(files)


def test_without_a_token_the_export_stays_and_one_line_tells(capsys, monkeypatch, once_calibrated, tmp_path):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    line = last_line(capsys, *export(once_calibrated, tmp_path / "folder"))
    assert "no token of the Hugging Face Hub: run 'hf auth login' or set HF_TOKEN" in line
    assert (tmp_path / "folder" / "model.safetensors").is_file()


class _Refusing(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(403)
        self.end_headers()
        self.wfile.write(b'{"error": "this token may not write"}')

    def log_message(self, format, *args):
        """Prints nothing."""


@pytest.mark.filterwarnings("ignore")
def test_a_refusal_of_the_hub_and_no_network_are_one_line(capsys, monkeypatch, once_calibrated, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    real = huggingface_hub.HfApi
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: real(endpoint=address))
        assert "me/mine was not uploaded (" in last_line(capsys, *export(once_calibrated, tmp_path / "refused"))
        server.shutdown()
    line = last_line(capsys, *export(once_calibrated, tmp_path / "offline"))
    assert "me/mine was not uploaded (" in line
    assert "the export is complete in" in line


@pytest.mark.parametrize(("to", "name"), [("npz", "me/mine"), ("lit-het", "mine")])
def test_what_cannot_be_pushed_is_refused_before_anything_is_written(capsys, once_calibrated, tmp_path, to, name):
    line = last_line(capsys, *export(once_calibrated, tmp_path / "out", to)[:-1], name)
    assert "needs OWNER/NAME and a folder" in line
    assert not (tmp_path / "out").exists()
