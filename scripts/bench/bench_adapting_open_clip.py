"""OpenCLIP's side of `bench_adapting`: its ViT-B-16, its loss, clipping and AdamW, as its training script has them."""

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import open_clip  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]

from lit_het.types import Batch


def open_clip_step(batch: Batch, compute_type: str) -> Callable[[], float]:
    """Returns what trains both towers by one step on a batch, and returns its seconds."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"
    torch.set_float32_matmul_precision("high")
    model: Any = open_clip.create_model("ViT-B-16", device=device)
    loss_of: Any = open_clip.ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    text = torch.from_numpy(np.array(batch.text)).long().to(device)
    pixels = torch.from_numpy(np.array(batch.image)).to(device)

    def timed() -> float:
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=compute_type == "bfloat16"):
            image = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0
            loss = loss_of(*model(image, text))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        float(loss.detach())
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return timed
