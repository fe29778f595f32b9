"""``lit-het embed``: computes the embeddings of a locked tower once and stores them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from lit_het import parameters, sharding
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar, message
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.embeddings import EmbeddingFolder, Precision, Recipe, describe
from lit_het.data_pipelines.shards import storage, urls
from lit_het.data_pipelines.shards.index import ShardIndex, ShardSummary, index_shard
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.portions import ALL
from lit_het.data_pipelines.shards.writing import IMAGE
from lit_het.errors import UserError, pluralize, require_at_least, require_choice
from lit_het.models.opening import open_run
from lit_het.models.pretrained import abstract_params, load_pretrained, load_weights
from lit_het.models.tower_fingerprints import classifier_fingerprint, tower_fingerprint
from lit_het.programs import shared
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.features import FeatureExtractor
from lit_het.tasks.quantities import logits
from lit_het.tasks.union import TaskConfig
from lit_het.towers.image_config import ImageTowerConfig
from lit_het.types import Batch, Params

# Maps a batch of the loader to the embeddings of its rows.
Encode = Callable[[Batch], jax.Array | np.ndarray]


@dataclasses.dataclass(frozen=True)
class EmbedOptions:
    """How embeddings are stored.

    Attributes:
        shards: shards to embed; empty takes those of the tower's configuration.
        dtype: type of the stored embeddings.
        num_crops: K, random crops per image; 0 for the preprocessing of evaluation.
        part: (I, N): embed every N-th shard from the I-th on; other hosts embed the others.
        tokens: whether to store all tokens of the image tower, for decoders, and not its pooled embedding.
        logits: whether to store the logits of a classifier, without noise and not calibrated, for distillation.
    """

    shards: tuple[str, ...] = ()
    dtype: Precision = "float16"
    num_crops: int = 0
    part: tuple[int, int] = (0, 1)
    tokens: bool = False
    logits: bool = False

    def __post_init__(self) -> None:
        if self.tokens and self.logits:
            raise UserError("--tokens and --logits are stored in folders of their own; leave out one of them")
        require_at_least(0, self, "num_crops")
        require_choice(self, "dtype")


def embed(source: Path | None, config: ExperimentConfig, output: str, options: EmbedOptions) -> None:
    """Writes the embeddings of all images; shards that already have embeddings are skipped.

    Each host embeds its own shards on its own devices. Hosts do not communicate.

    Args:
        source: a run, or the configuration file of the run that is to be trained on the embeddings; None for a
            configuration without a file.
        config: its configuration, see `lit_het.configs.parsing.parse_tower`.
        output: the folder to write to: a local path or an fsspec address.
        options: how.
    """
    _check_tower(config.task.require_image_tower(), options)
    data = whole_data(config, options)
    addresses = addresses_of(data, options)
    mesh = config.mesh.build(jax.local_devices())
    sharding.check_batch_size(data.batch_size, mesh)
    params = tower_params(source, config, "image_tower")
    if options.tokens:
        config, params = _without_pooling(config, params)
    num_classes = _num_classes(config.task, params) if options.logits else None
    tower = config.task.require_image_tower()
    recipe = Recipe(
        tower=(classifier_fingerprint if options.logits else tower_fingerprint)(config, params),
        inputs=describe(data.training, data.image_size, random=options.num_crops > 0),
        size=num_classes or FeatureExtractor(tower).size,
        num_crops=options.num_crops,
        dtype=options.dtype,
        seed=data.seed,
        num_tokens=tower.num_tokens if options.tokens else 0,
        logits=options.logits,
    )
    store(recipe, data, addresses, output, lambda: _encoder(config, params, mesh, logits=options.logits))


def store(
    recipe: Recipe, data: LoaderConfig, addresses: Sequence[str], output: str, encoder: Callable[[], Encode]
) -> None:
    """Writes the embeddings of all images; shards that already have embeddings are skipped.

    Args:
        recipe: how they are computed.
        data: how images are read.
        addresses: the shards of this host.
        output: the folder to write to: a local path or an fsspec address.
        encoder: returns what embeds a batch; called if an embedding is missing.
    """
    folder = EmbeddingFolder(output, recipe)
    missing, num_samples = missing_shards(folder, addresses, IMAGE)
    if not missing:
        return
    # The allowed fraction refers to all samples, not only to those of the missing shards.
    allowed = data.max_bad_fraction * num_samples / max(1, sum(shard.count for shard in missing))
    shards = tuple(shard.address for shard in missing)
    loader = Loader(dataclasses.replace(data, shards=shards, mixture=(), max_bad_fraction=min(1.0, allowed)))
    if recipe.num_tokens:
        message(_disk_space(recipe, loader.num_samples))
    encode = encoder()
    with Bar("embedding", loader.num_samples * max(1, recipe.num_crops), "images") as bar:
        unread = _write(folder, loader, encode, bar.advance)
    for (shard, cause), count in sorted(loader.faults.counts.items()):
        message(f"{shard}: {pluralize(count, 'image')} without embedding: {cause}")
    if unread:
        raise UserError(
            f"{unread} of {len(missing)} shards could not be read completely; run the command again to embed them"
        )
    message(f"wrote the embeddings of {pluralize(len(missing), 'shard')} to {output}")


def _check_tower(tower: ImageTowerConfig, options: EmbedOptions) -> None:
    """Checks that tokens are stored exactly where they are asked for, and that the tower has them."""
    if not options.tokens:
        if tower.num_tokens and not tower.pools_tokens:
            raise UserError(
                f"the tower has no pooling: its embedding of an image would be all of its {tower.num_tokens} tokens; "
                "store them with --tokens"
            )
    elif tower.without_pooling() is None:
        raise UserError("--tokens needs a ViT without ensembles of experts, uncertainty tokens and max_patches")


def _num_classes(task: TaskConfig, params: Params) -> int:
    """Returns the number of logits that a classifier gives."""
    if not isinstance(task, ClassificationConfig) or "head" not in params:
        raise UserError("--logits needs a trained classifier: name its run with --tower, or leave out --logits")
    return task.num_classes


def _without_pooling(config: ExperimentConfig, params: Params) -> tuple[ExperimentConfig, Params]:
    """Returns a decoder on the image tower, whose embedding of an image is all of its tokens, and its parameters."""
    tower = config.task.require_image_tower().without_pooling()
    assert tower is not None, "checked"
    task = CaptioningConfig(tower)
    names = task.build().shapes["image_tower"]
    kept = {name: tree for name, tree in params["image_tower"].items() if name in names}
    return dataclasses.replace(config, task=task), {"image_tower": kept}


def _disk_space(recipe: Recipe, num_images: int) -> str:
    """Returns how much disk space tokens take, as a product."""
    count, views, bytes_each = recipe.num_tokens, recipe.num_crops or 1, np.dtype(recipe.dtype).itemsize
    crops = f" × {views} crops" if views > 1 else ""
    size = num_images * views * recipe.size * bytes_each / 1e9
    return (
        f"{num_images:,} images{crops} × {count} tokens × {recipe.size // count} × {bytes_each} bytes = {size:,.3g} GB"
    )


def missing_shards(folder: EmbeddingFolder, addresses: Sequence[str], member: str) -> tuple[list[ShardSummary], int]:
    """Returns the shards without embeddings, and the number of samples of all shards; a message counts the others."""
    with Bar("indexing", len(addresses), "shards") as bar:
        index = ShardIndex(addresses, [member], advance=bar.advance)
    with ThreadPoolExecutor(storage.MAX_REQUESTS) as pool:
        there = pool.map(folder.has, index.summaries)
        missing = [shard for shard, is_there in zip(index.summaries, there, strict=True) if not is_there]
    if len(missing) < len(addresses):
        there = len(addresses) - len(missing)
        message(f"{there} of {len(addresses)} shards already have embeddings in {folder.address}")
    return missing, len(index)


def whole_data(config: ExperimentConfig, options: EmbedOptions) -> LoaderConfig:
    """Returns the data to embed: all samples of the shards."""
    data = dataclasses.replace(
        config.data.without_embeddings(), labels=None, portion=ALL, suspects=None, exclude=(), stream=None
    )
    if options.num_crops and data.crop is None and not data.augmentations:
        raise UserError(
            "all crops would be equal: give `crop` or `augmentations` in the configuration, or leave out --crops"
        )
    return dataclasses.replace(data, shards=options.shards, mixture=()) if options.shards else data


def addresses_of(data: LoaderConfig, options: EmbedOptions) -> list[str]:
    """Returns the shards that this host embeds."""
    addresses = list(dict.fromkeys(itertools.chain(*data.data_sets())))
    for address in filter(urls.is_pipe, addresses):
        raise UserError(f"{address}: a command cannot seek, which embed needs; name files with --data")
    number, count = options.part
    return addresses[number::count]


def tower_params(source: Path | None, config: ExperimentConfig, part: str) -> Params:
    """Returns the parameters of a tower under its key, such as ``image_tower``; arguments as those of `embed`."""
    if source is None or ".py" in source.name:
        shapes = {part: abstract_params(config.task.build())[part]}
        return load_weights(config.task, shapes) or load_pretrained(config, shapes)
    return open_run(source).params


def _encoder(config: ExperimentConfig, params: Params, mesh: Mesh, *, logits: bool) -> Encode:
    """Returns the compiled tower, or classifier, with its parameters on the devices of the mesh."""
    tower, found = config.task.require_image_tower(), None
    weights = parameters.cast({"image_tower": params.get("image_tower", {})}, tower.compute_type)
    if logits:
        assert isinstance(config.task, ClassificationConfig), "checked"
        weights["head"], found = params["head"], _logits(config.task)
    placed = jax.device_put(weights, sharding.tree_shardings(weights, mesh))
    found = found or _features(tower)

    def encode(batch: Batch) -> jax.Array:
        with jax.set_mesh(mesh):
            return found(placed, jax.device_put(batch.image, sharding.batch_sharding(mesh)))

    return encode


@shared
def _features(tower: ImageTowerConfig) -> Callable[[Params, jax.Array], jax.Array]:
    return jax.jit(FeatureExtractor(tower))


@shared
def _logits(config: ClassificationConfig) -> Callable[[Params, jax.Array], jax.Array]:
    task = config.build()
    return jax.jit(lambda params, image: logits(task.image_classifier(params), task.features(params, image)))


def _write(folder: EmbeddingFolder, loader: Loader, encode: Encode, advance: Callable[[int], None]) -> int:
    """Embeds all samples of a loader and writes the file of each shard after its last sample.

    Returns:
        The number of shards that were not written because they could not be read completely.
    """
    views, size = max(1, folder.recipe.num_crops), folder.recipe.size
    counts = loader.index.counts
    rows = _rows(loader.epoch(num_crops=folder.recipe.num_crops), encode, sum(counts) * views, advance)
    in_shards = _regrouped(rows, [count * views for count in counts], (size, np.dtype(folder.recipe.dtype)))
    unread = 0
    for summary, count, embeddings in zip(loader.index.summaries, counts, in_shards, strict=True):
        if any((summary.address, cause) in loader.faults.counts for cause in storage.TRANSIENT_CAUSES):
            unread += 1
            continue
        table = index_shard(summary.address)
        if table.digest != summary.digest:
            raise UserError(f"{summary.address} changed while it was embedded; run the command again")
        folder.write(table, embeddings.reshape(count, views, size))
    return unread


def _rows(
    batches: Iterable[Batch], encode: Encode, total: int, advance: Callable[[int], None]
) -> Iterator[Float[np.ndarray, "rows d"]]:
    """Yields the embeddings of each batch, ``total`` rows in all; invalid rows are NaN."""
    left = total

    def fetched(batch: Batch, embeddings: jax.Array | np.ndarray) -> np.ndarray:
        nonlocal left
        rows = np.array(embeddings, np.float32)
        if not np.isfinite(rows[batch.valid]).all():
            raise UserError("an embedding is not finite; check the tower's weights and compute_type")
        rows[~batch.valid] = np.nan
        rows = rows[:left]  # the last batch is padded
        left -= len(rows)
        advance(len(rows))
        return rows

    previous: tuple[Batch, jax.Array | np.ndarray] | None = None
    for batch in batches:
        # Dispatch the next batch before waiting for this one, so that the device is never idle.
        current = batch, encode(batch)
        if previous is not None:
            yield fetched(*previous)
        previous = current
    if previous is not None:
        yield fetched(*previous)


def _regrouped(
    parts: Iterator[Float[np.ndarray, "rows d"]], counts: Iterable[int], form: tuple[int, np.dtype]
) -> Iterator[Float[np.ndarray, "rows d"]]:
    """Regroups a stream of rows into arrays of the given lengths, of one size and type of rows."""
    size, dtype = form
    left = np.empty((0, size), np.float32)
    for count in counts:
        # Written in place and in the stored type: the tokens of a shard fill much of the memory.
        rows, have = np.empty((count, size), dtype), 0
        while have < count:
            left = next(parts) if not len(left) else left
            some, left = left[: count - have], left[count - have :]
            with np.errstate(over="ignore"):  # an infinity is refused before it is written
                rows[have : have + len(some)] = some
            have += len(some)
        yield rows
