"""The PyTorch side of `bench_train`: LiT with a deterministic head, of the same shapes, as one would write it."""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.types import Batch


class TorchStep:
    """A training step: locked image tower, AdamW, clipping, softmax loss.

    Attributes:
        flops: of its matrix products, as many as those of the step that it is compared with.
        memory: on a GPU, bytes of its parameters, their gradients and moments, and what the last step added to them.
    """

    memory: int | None = None

    def __init__(self, config: ContrastiveConfig, compute_type: str, flops: int, *, compiled: bool):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.set_float32_matmul_precision("high")
        self.flops = flops
        self._device = "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"
        self._dtype = getattr(torch, compute_type)
        image: Any = config.image_tower
        text: Any = config.text_tower
        self._image = _ImageTower(image.patch_size, image.num_patches, image.encoder).to(self._device).eval()
        self._image = self._image.requires_grad_(False).to(self._dtype)  # as the locked parameters of `TrainingStep`
        self._text = _TextTower(text.vocabulary_size, text.length, text.embedding_size, text.encoder).to(self._device)
        self._log_scale = nn.Parameter(torch.tensor(10.0, device=self._device).log())
        parameters = [*self._text.parameters(), self._log_scale]
        self._optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=self._device == "cuda")
        self._locked = list(self._image.parameters())
        if compiled:
            # Lengths of text would otherwise make one program of unknown sizes.
            self._image, self._text = (torch.compile(part, dynamic=False) for part in (self._image, self._text))
        self._parameters = parameters

    def place(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns images or embeddings and texts on the device, once they are there."""
        view, text = (torch.from_numpy(np.array(x)) for x in (batch.view, batch.text))
        if self._device == "cuda":
            view, text = (x.pin_memory().to(self._device, non_blocking=True) for x in (view, text))
            torch.cuda.synchronize()
        return view, text

    def __call__(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], float]:
        """Begins a step and returns what waits for its end."""
        before = self._begin_memory()
        with torch.autocast(self._device, self._dtype, enabled=self._dtype != torch.float32):
            loss = self._loss(*batch)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()

        def wait() -> float:
            value = float(loss.detach())  # the stream has then done what came after the loss, too
            self._end_memory(before)
            return value

        return wait

    def _begin_memory(self) -> int:
        if self._device != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _end_memory(self, before: int) -> None:
        """Other steps have parameters in the same memory, which are left out."""
        if self._device == "cuda":
            moments = [x for state in self._optimizer.state.values() for x in state.values()]
            gradients = [x.grad for x in self._parameters if x.grad is not None]
            own = sum(x.nbytes for x in (*self._locked, *self._parameters, *moments, *gradients))
            self.memory = torch.cuda.max_memory_allocated() - before + own

    def _loss(self, view: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if view.ndim == 4:
            with torch.inference_mode():
                embedding = self._image(view)
            view = embedding.clone()  # gradients cannot pass through tensors of that mode
        image, words = (functional.normalize(side.float(), dim=1) for side in (view, self._text(text.long())))
        logits, labels = self._log_scale.exp() * image @ words.T, torch.arange(len(image), device=image.device)
        return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, queries: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        b, _, width = queries.shape
        parts = self.query(queries), self.key(tokens), self.value(tokens)
        query, key, value = (x.view(b, x.shape[1], self.num_heads, -1).transpose(1, 2) for x in parts)
        attended = functional.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).reshape(b, -1, width))


def _mlp(config: EncoderConfig) -> nn.Sequential:
    up, down = nn.Linear(config.width, config.mlp_width), nn.Linear(config.mlp_width, config.width)
    return nn.Sequential(up, nn.GELU(approximate="tanh"), down)


class _Block(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(config.width, config.norm_epsilon) for _ in range(2))
        self.attention, self.mlp = _Attention(config.width, config.num_heads), _mlp(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.norms[0](x)
        x = x + self.attention(seen, seen)
        return x + self.mlp(self.norms[1](x))


class _Encoder(nn.Sequential):
    """Blocks whose activations are of the type that is computed in."""

    def __init__(self, config: EncoderConfig):
        super().__init__(
            *(_Block(config) for _ in range(config.depth)), nn.LayerNorm(config.width, config.norm_epsilon)
        )
        self.dtype = getattr(torch, config.compute_type)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.dtype))


class _ImageTower(nn.Module):
    """A ViT with attention pooling."""

    def __init__(self, patch_size: int, num_patches: int, config: EncoderConfig):
        super().__init__()
        self.patch_size = patch_size
        self.patches = nn.Linear(3 * patch_size**2, config.width)
        self.positions = nn.Parameter(torch.zeros(num_patches, config.width))
        self.encoder = _Encoder(config)
        self.probe = nn.Parameter(torch.zeros(1, 1, config.width))
        self.pooling, self.norm = _Attention(config.width, config.num_heads), nn.LayerNorm(config.width)
        self.mlp = _mlp(config)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        b, p = len(image), self.patch_size
        side = image.shape[1] // p
        pixels = image.view(b, side, p, side, p, 3).permute(0, 1, 3, 2, 4, 5).reshape(b, side**2, -1)
        tokens = self.encoder(self.patches(pixels / 127.5 - 1.0) + self.positions)
        pooled = self.pooling(self.probe.expand(b, -1, -1), tokens)[:, 0]
        return pooled + self.mlp(self.norm(pooled))


class _TextTower(nn.Module):
    """A Transformer whose last position is projected."""

    def __init__(self, vocabulary_size: int, length: int, embedding_size: int, config: EncoderConfig):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, config.width)
        self.positions = nn.Parameter(torch.zeros(length, config.width))
        self.encoder = _Encoder(config)
        self.projection = nn.Linear(config.width, embedding_size)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.projection(self.encoder(self.tokens(text) + self.positions)[:, -1])
