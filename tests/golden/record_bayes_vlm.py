"""Records the outputs of BayesVLM (github.com/AaltoML/BayesVLM): ``python record_bayes_vlm.py CHECKOUT OUTPUT``.

Needs torch, transformers and tqdm.
"""

# pyright: reportMissingImports=false

import importlib
import sys
from typing import Any
from unittest import mock

import numpy as np

B, K, D, P, TAU, BIAS = 8, 5, 6, 4, 0.2, -2.0


def kfac_of_their_script():
    """Returns the sums of both factors; what their script reads data sets with needs many packages, and is left out."""
    names = ("bayesvlm.data.factory", "bayesvlm.utils", "bayesvlm.precompute")
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in names}):
        return importlib.import_module("scripts.hessian_estimation").kfac_ggn


def main(checkout, output):
    sys.path.insert(0, checkout)
    from bayesvlm.epig import epig_from_probs_using_matmul
    from bayesvlm.hessians import (
        KroneckerFactorizedCovariance,
        compute_hessian_analytic_InfoNCE,
        compute_hessian_analytic_SigLIP,
        compute_log_det_kfac,
    )
    from bayesvlm.vlm import CLIP, SIGLIP, EncoderResult

    torch = importlib.import_module("torch")

    def draw(*shape):
        return torch.tensor(random.normal(size=shape), dtype=torch.float32)

    def factor(size):
        rows = draw(20, size)
        return rows.T @ rows / 20 + torch.eye(size)

    random = np.random.default_rng(0)
    image, text = (torch.nn.functional.normalize(draw(B, D), dim=1) for _ in range(2))
    scale, bias = torch.tensor(1 / TAU).log(), torch.tensor(BIAS)
    found = {"image": image, "text": text, "temperature": torch.tensor(TAU), "bias": bias}
    found["softmax_hessian"] = compute_hessian_analytic_InfoNCE(image, text, scale)
    found["sigmoid_hessian"] = compute_hessian_analytic_SigLIP(image, torch.arange(B), text, scale, bias)

    layers, sides = [draw(P, D) for _ in range(2)], []
    for name, count, layer in (("source", B, layers[0]), ("target", K, layers[1])):
        phi, a, b = draw(count, P), factor(P), factor(D)
        covariance = KroneckerFactorizedCovariance(torch.linalg.inv(a), torch.linalg.inv(b))
        sides.append((EncoderResult(embeds=phi @ layer, activations=phi), covariance))
        found |= {f"{name}_activations": phi, f"{name}_embeddings": phi @ layer, f"{name}_a": a, f"{name}_b": b}
    found["log_determinant"] = compute_log_det_kfac(found["source_a"], found["source_b"])
    model = CLIP(float(scale), 0.0, sides[0][1], sides[1][1])
    logits = model._compute_probabilistic_logits_smith(sides[0][0], sides[1][0])
    found |= {"logits_mean": logits.mean.detach(), "logits_variance": logits.var.detach()}
    found["probit"] = (logits.mean / torch.sqrt(1 + torch.pi / 8 * logits.var)).detach()

    pool, target = (torch.softmax(2 * draw(count, 50, K), dim=2) for count in (6, 4))
    found |= {"pool": pool, "target": target, "epig": epig_from_probs_using_matmul(pool, target)}
    image, text, phi = 3 * draw(2 * B, D), 2 * draw(2 * B, D), draw(2 * B, P)
    found |= {"kfac_image": image, "kfac_text": text, "kfac_activations": phi}
    for loss, likelihood, vlm in (("softmax", "info_nce", CLIP), ("sigmoid", "siglip", SIGLIP)):
        a, b = kfac_of_their_script()(vlm(float(scale), BIAS), B, B // 2, image, phi, text, "cpu", likelihood)
        found |= {f"{loss}_kfac_a": a, f"{loss}_kfac_b": b}
    arrays: Any = {name: np.asarray(value) for name, value in found.items()}
    np.savez(output, **arrays)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
