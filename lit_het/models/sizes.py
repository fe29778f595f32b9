"""The image tower of a trained run at another size of patches or images (FlexiViT; SoViT Sec. 5.5, Fig. 7)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.models.opening import Run
from lit_het.weights.resample import resample


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of patches and images in pixels, or the most patches of an image; None for those of training."""

    patch: int | None = None
    image: int | None = None
    patches: int | None = None

    def __post_init__(self) -> None:
        flags = {"--patch-size": self.patch, "--image-size": self.image, "--max-patches": self.patches}
        for flag, size in flags.items():
            if size is not None and size < 1:
                raise UserError(f"{flag} {size} must be at least 1")


AS_TRAINED = Sizes()


def with_sizes(run: Run, sizes: Sizes) -> Run:
    """Returns a run whose image tower has patches, or sees images, of another size than in training.

    The first layer is resized by a pseudo-inverse, and learned positions are resized bilinearly.

    Args:
        run: the trained run.
        sizes: the new ones.
    """
    if sizes == AS_TRAINED:
        return run
    tower: Any = run.config.task.image_tower
    if not tower.pools_tokens:
        raise UserError(
            f"the image tower of {run.run_dir} is no ViT with any number of patches; leave out --patch-size and "
            "--image-size"
        )
    if tower.patches is not None and sizes.image is not None:
        raise UserError(
            f"the image tower of {run.run_dir} takes {tower.patches}, of images of any shape; set --max-patches "
            "instead of --image-size"
        )
    if tower.patches is None and sizes.patches is not None:
        raise UserError(f"the image tower of {run.run_dir} takes squares; set --image-size instead of --max-patches")
    resized = dataclasses.replace(
        tower,
        patch_size=sizes.patch or tower.patch_size,
        image_size=sizes.image or tower.image_size,
        patch_sizes=(),
        max_patches=sizes.patches or tower.max_patches,
    )
    task = dataclasses.replace(run.config.task, image_tower=resized)
    preprocessing = dataclasses.replace(run.config.data.preprocessing, patches=resized.patches)
    data = dataclasses.replace(run.config.data, image_size=resized.image_size, preprocessing=preprocessing)
    flat = parameters.flatten(run.params["image_tower"])
    params = parameters.unflatten(
        {path: jnp.asarray(resample(path, np.asarray(x), tower, resized), x.dtype) for path, x in flat.items()}
    )
    return dataclasses.replace(
        run,
        config=dataclasses.replace(run.config, task=task, data=data),
        task=task.build(),
        params={**run.params, "image_tower": params},
    )
