"""``lit-het embed --texts``: computes the embeddings of captions by a locked text tower once and stores them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from lit_het import parameters, sharding
from lit_het.apps.embed.images import EmbedOptions, addresses_of, missing_shards, tower_params, whole_data
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar, message
from lit_het.data_pipelines.embeddings import EmbeddingFolder, Recipe, describe_captions
from lit_het.data_pipelines.shards.index import ShardIndex, ShardSummary, index_shard
from lit_het.data_pipelines.shards.storage import TRANSIENT_CAUSES, Unreadable
from lit_het.data_pipelines.texts.captions_config import TextPlace
from lit_het.data_pipelines.texts.tokenizers import Tokenizer
from lit_het.errors import UserError, pluralize
from lit_het.models.tower_fingerprints import tower_fingerprint
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.types import Params

_PER_DEVICE = 64
# Every sample of a shard takes as much space as the one with the most captions.
_MOST_CAPTIONS = 64

# Token ids ``[n l]`` of distinct captions to their embeddings.
_Embed = Callable[[Int[np.ndarray, "n l"]], Float[np.ndarray, "n d"]]


def embed_captions(source: Path | None, config: ExperimentConfig, output: str, options: EmbedOptions) -> None:
    """Writes the embeddings of all captions; shards that already have embeddings are skipped.

    Args:
        source: as that of `lit_het.apps.embed.images.embed`.
        config: of the model.
        output: the folder to write to: a local path or an fsspec address.
        options: how; without crops.
    """
    if not isinstance(config.task, ContrastiveConfig) or config.tokenizer is None:
        raise UserError("--texts needs an image-text model with a tokenizer; leave it out to embed images")
    if config.task.text_members > 1:
        raise UserError(
            f"--texts embeds the captions of one text tower, and the model has task.text_members = "
            f"{config.task.text_members}; name another model"
        )
    of_images = {"--crops": options.num_crops, "--tokens": options.tokens, "--logits": options.logits}
    if flag := next((name for name, given in of_images.items() if given), None):
        raise UserError(f"{flag} are of images; leave out {flag} or --texts")
    data = whole_data(config, options)
    tokenizer, place, addresses = config.tokenizer.build(), data.texts[0], addresses_of(data, options)
    params = tower_params(source, config, "text_tower")
    recipe = Recipe(
        tower=tower_fingerprint(config, params, tokenizer),
        inputs=describe_captions(place),
        size=config.task.text_tower.output_size,
        num_crops=0,
        dtype=options.dtype,
        seed=0,
    )
    folder, member = EmbeddingFolder(output, recipe), place.only_member()
    missing, _ = missing_shards(folder, addresses, member)
    if not missing:
        return
    embed, broken = _embedder(config.task, params, config.mesh.build(jax.local_devices())), 0
    with Bar("embedding", sum(shard.count for shard in missing), "texts") as bar:
        for shard in missing:
            captions = _captions_of(shard, place)
            broken += sum(not texts for texts in captions)
            views = np.full((len(captions), max(map(len, captions), default=1) or 1, recipe.size), np.nan, np.float32)
            _fill(views, captions, tokenizer, embed)
            folder.write(index_shard(shard.address), views, member)
            bar.advance(len(captions))
    if broken:
        check = f"lit-het data check SHARDS --captions {data.captions}"
        message(f"{pluralize(broken, 'sample')} without embedding: {check} lists them")
    message(f"wrote the embeddings of {pluralize(len(missing), 'shard')} to {output}")


def _captions_of(shard: ShardSummary, place: TextPlace) -> list[list[str]]:
    """Returns the captions of each sample of a shard, none where they are broken."""
    member = place.only_member()
    index = ShardIndex([shard.address], [member])
    found = list[list[str]]()
    for number, (content,) in enumerate(index.read(range(len(index)), [member])):
        try:
            found.append([text.text for text in place.read({member: content})])
            if (count := len(found[-1])) > _MOST_CAPTIONS:
                raise UserError(
                    f"{shard.address}: {index.key(number)} has {count:,} captions, more than {_MOST_CAPTIONS}; take "
                    "the whole text for one (--data.caption-unit text), or train without stored captions"
                )
        except Unreadable as error:
            if error.cause in TRANSIENT_CAUSES:
                raise UserError(f"{shard.address} could not be read ({error}); run the command again") from error
            found.append([])
    return found


def _fill(
    views: Float[np.ndarray, "n views d"], captions: Sequence[Sequence[str]], tokenizer: Tokenizer, embed: _Embed
) -> None:
    """Sets the embeddings of each sample's captions."""
    texts = list(dict.fromkeys(text for sample in captions for text in sample))
    if not texts:
        return
    # Captions that differ in what the tokenizer leaves out are embedded once.
    ids, inverse = np.unique(tokenizer(texts), axis=0, return_inverse=True)
    embeddings, row_of = embed(ids), dict(zip(texts, inverse.ravel().tolist(), strict=True))
    for number, sample in enumerate(captions):
        views[number, : len(sample)] = embeddings[[row_of[text] for text in sample]]


def _embedder(config: ContrastiveConfig, params: Params, mesh: Mesh) -> _Embed:
    """Returns the compiled text tower, with its parameters on the devices of the mesh."""
    # In the type in which training holds locked parameters.
    weights = parameters.cast(params["text_tower"], config.image_tower.compute_type)
    placed = jax.device_put(weights, sharding.tree_shardings(weights, mesh))
    graph = nnx.graphdef(nnx.eval_shape(lambda: config.text_tower.build(nnx.Rngs(0))))

    @jax.jit
    def tower(params: Params, ids: Int[Array, "b l"]) -> Float[Array, "b d"]:
        return nnx.merge(graph, params)(ids).embedding

    size = _PER_DEVICE * sharding.num_batch_shards(mesh)

    def embed(ids: Int[np.ndarray, "n l"]) -> Float[np.ndarray, "n d"]:
        found = []
        for start in range(0, len(ids), size):
            rows = ids[start : start + size]
            # Padded to one size, so that JAX compiles once.
            padded = np.concatenate([rows, rows[-1:].repeat(size - len(rows), axis=0)])
            with jax.set_mesh(mesh):
                some = tower(placed, jax.device_put(padded, sharding.batch_sharding(mesh)))
            found.append(np.asarray(some, np.float32)[: len(rows)])
        embeddings = np.concatenate(found)
        if not np.isfinite(embeddings).all():
            raise UserError("an embedding is not finite; check the tower's weights and compute_type")
        return embeddings

    return embed
