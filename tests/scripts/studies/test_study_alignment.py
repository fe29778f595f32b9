"""The study of alignment: its NumPy agrees with the head, and it trains, measures and resumes."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het import parameters
from lit_het.configs import glyph_classifier
from lit_het.heads.het import HetClassifier
from scripts.studies import study_alignment
from scripts.studies.study_alignment import HEAD, cosines
from tests import tiny

D, K = 12, 60


def flat(head: HetClassifier) -> dict[str, np.ndarray]:
    found = parameters.flatten(nnx.to_pure_dict(nnx.state(head, nnx.Param)))
    return {f"head/{path}": np.asarray(x, np.float64) for path, x in found.items()}


def test_the_cosines_are_those_of_the_head_and_what_moves_all_logits_is_apart():
    head = HEAD.build(D, K, nnx.Rngs(0))
    # A direction of W that is constant, as that of d(x) nearly is.
    head.logits.kernel[...] = head.logits.kernel[...].at[0].set(1.0)
    inputs = np.random.default_rng(0).normal(size=(4, D)).astype(np.float32)
    found = cosines(flat(head), inputs)
    np.testing.assert_allclose(found["learned"][:, 0], head.kernel_alignment(jnp.asarray(inputs))[:, 0], atol=1e-4)
    np.testing.assert_allclose(found["learned"][:, 2], 1.0, atol=1e-6)
    assert (found["learned"][:, 0] > found["random"][:, 0]).all()
    assert (found["learned"][:, 1] < found["learned"][:, 0]).all()


@pytest.mark.slow
def test_runs_are_trained_once_and_measured(data, tmp_path, monkeypatch, capsys):
    def configuration(root, data, seed, steps):
        return tiny.shrink(glyph_classifier.get_config(root, HEAD), data, root / "het")

    monkeypatch.setattr(study_alignment, "configuration", configuration)
    monkeypatch.setattr(study_alignment, "TYPEFACE", "train")
    monkeypatch.setattr(study_alignment, "write_data", lambda *_: None)
    flags = ["--output", str(tmp_path), "--data", str(data), "--seeds", "0", "1"]
    with tiny.untrained():
        assert study_alignment.main(flags) == 0
    table = (tmp_path / "alignment.md").read_text()
    assert table in capsys.readouterr().out
    assert table.splitlines()[0] == "| W | all noise | rows less their mean | constant vector |"
    assert study_alignment.main([*flags, "--table"]) == 0
    assert (tmp_path / "alignment.md").read_text() == table
