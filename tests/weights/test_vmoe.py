"""Imported V-MoE and e3 towers reproduce the recorded outputs of the original code; their file format is read."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
import scipy.special

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.towers import routing
from lit_het.towers.positions import sine_cosine_positions
from lit_het.weights import formats
from lit_het.weights.rename import load
from lit_het.weights.sources import StoredArray
from lit_het.weights.vmoe.importing import describe_two_towers, describe_vmoe, read_vmoe
from tests.towers.models import shapes, with_encoder
from tests.towers.test_routing import with_gshard
from tests.weights.importing import (
    apply,
    assert_recorded,
    golden,
    image_tower,
    loaded,
    params_of,
    pixels,
    run,
    text_tower,
    unit,
)


def recorded(name):
    arrays = golden(f"model_{name}")
    return arrays, json.loads(arrays.pop("__meta__").tobytes())


def stored(tree, top="params/"):
    return {
        name.removeprefix(top): StoredArray(array.shape, lambda array=array: array)
        for name, array in tree.items()
        if name.startswith(top)
    }


def imported(name, **changes):
    """Returns a recorded model's tower, its parameters and the head's, in the groups of the recording."""
    golden, meta = recorded(name)
    router = meta["moe"]["router"]
    experts = {
        "num_selected": router["num_selected_experts"],
        "num_members": meta["moe"].get("ensemble_size", 1),
        "eval_capacity_factor": router["dispatcher"]["capacity_factor"],
        "tokens_per_group": meta["moe"]["group_size"],
        **changes,
    }
    found = describe_vmoe(stored(golden), experts=experts)
    assert found.image_tower is not None
    tower = dataclasses.replace(found.image_tower, members="apart")
    head = {"kernel": (meta["hidden_size"], 7), "bias": (7,)}
    logits = {name: jax.ShapeDtypeStruct(shape, float) for name, shape in head.items()}
    tree = {"image_tower": shapes(tower), "head": {"logits": logits}}
    return golden, tower, load(found.arrays, found.parameter_sources, tree)


def logits(tower, params, images, key=None):
    output = apply(tower, params["image_tower"], jnp.asarray((images + 1) * 127.5), key)
    head = params["head"]["logits"]
    return output.embedding @ head["kernel"] + head["bias"][None], output


@pytest.mark.parametrize("name", ["dense_token", "last2_K1_eval", "e3_M2_K1_eval"])
def test_the_imported_tower_gives_the_recorded_logits(name):
    golden, tower, params = imported(name)
    with jax.default_matmul_precision("highest"):
        ours, output = jax.jit(functools.partial(logits, tower))(params, golden["images"])
    np.testing.assert_allclose(ours, golden["logits"], atol=1e-5)
    assert output.auxiliary_losses == {}  # deterministic
    if name.startswith("e3"):
        mean = scipy.special.softmax(ours, axis=-1).reshape(4, 2, 7).mean(axis=1)
        np.testing.assert_allclose(np.log(mean), golden["ens_log_mean_prob"], atol=1e-5)
    if tower.encoder.experts is not None:
        recorded_loss = sum(golden[f"metrics/encoderblock_{n}/importance_loss"].mean() for n in (1, 3))
        np.testing.assert_allclose(output.metrics["importance_loss"], recorded_loss, rtol=1e-4)


def test_an_ensemble_is_checked_against_the_experts_of_the_file():
    golden, _ = recorded("last2_K1_eval")
    with pytest.raises(UserError, match="num_experts = 4 cannot be split in 3 members"):
        describe_vmoe(stored(golden), experts={"num_members": 3})
    found = describe_vmoe(stored(golden), experts={"num_members": 4, "num_selected": 1}).image_tower
    assert found is not None
    assert found.encoder.num_members == 4


@pytest.mark.slow
def test_both_dispatches_agree_where_nothing_is_dropped():
    golden, tower, params = imported("e3_M2_K1_eval")
    images, own = golden["images"], tower.encoder.experts
    assert own is not None

    def gradient_of(**changes):
        experts = dataclasses.replace(own, eval_capacity_factor=8.0, num_selected=2, **changes)
        changed = with_encoder(tower, experts=experts)

        def loss(params):
            ours, output = logits(changed, params, images)
            return jnp.sum(ours**2), output.metrics["dropped_tokens"]

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    (value, dropped), gradient = gradient_of()
    assert dropped == 0
    (ragged_value, _), ragged_gradient = gradient_of(dispatch="ragged")
    np.testing.assert_allclose(ragged_value, value, rtol=1e-5)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), ragged_gradient, gradient)


@pytest.fixture
def recorded_noise(monkeypatch):
    """Replaces the random noise of every block by the recorded noise, and adds GShard's loss."""

    def install(noise, key):
        keys = [jax.random.split(jax.random.fold_in(key, number))[0] for number in range(len(noise))]
        table = jnp.stack([jax.random.key_data(key) for key in keys])

        def normal(key, shape):
            number = jnp.argmax(jnp.all(table == jax.random.key_data(key)[None], axis=1))
            return jnp.asarray(np.stack(noise))[number].reshape(shape)

        route = routing.route

        monkeypatch.setattr("lit_het.towers.experts.jax.random.normal", normal)
        # Recorded with the weight 0.01, twice the weight of each of our two losses.
        monkeypatch.setattr("lit_het.towers.routing.route", lambda *args: with_gshard(route(*args), 2))

    return install


@pytest.mark.slow
def test_training_gives_the_recorded_loss_and_gradients(recorded_noise):
    golden, tower, params = imported("every2_K1_train_grads_indices")
    key = jax.random.key(0)
    recorded_noise([golden[f"noise/{number}"] for number in range(3)], key)

    def loss(params):
        ours, output = logits(tower, params, golden["images"], key)
        log_p = jax.nn.log_softmax(ours)
        main = -jnp.mean(log_p[jnp.arange(4), golden["labels"]])
        return main + sum(output.auxiliary_losses.values()), (main, ours)

    with jax.default_matmul_precision("highest"):
        (total, (main, ours)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(ours, golden["logits"], atol=2e-5)
    np.testing.assert_allclose(main, golden["main_loss"], rtol=1e-5)
    np.testing.assert_allclose(total, golden["total_loss"], rtol=1e-5)

    # Recorded gradients in our layout. An import adds its position to the class token, whose gradient is checked below.
    assert tower.encoder.experts is not None
    found = describe_vmoe(stored(golden, "grads/"), experts=dataclasses.asdict(tower.encoder.experts))
    recorded_gradient = load(found.arrays, found.parameter_sources, jax.eval_shape(lambda: params))
    theirs, ours = parameters.flatten(recorded_gradient), parameters.flatten(gradient)
    for path in sorted(ours.keys() - {"image_tower/class_token"}):
        scale = np.abs(theirs[path]).max()
        np.testing.assert_allclose(ours[path], theirs[path], atol=1e-3 * scale + 1e-6, err_msg=path)
    np.testing.assert_allclose(ours["image_tower/class_token"], golden["grads/cls"][0, 0], rtol=1e-3, atol=1e-6)


# ---- the file format, written as by the original code ----


def packed(value) -> bytes:
    written = msgpack.packb(value, use_bin_type=True)
    assert written is not None
    return written


def slices(start_stop):
    return packed(tuple(packed((start, stop, None)) for start, stop in start_stop))


def write_checkpoint(prefix, tree, num_shards=2):
    """Writes arrays split along the first axis into one slice per shard, each slice in two chunks."""
    index: dict = {}
    shards: list[dict] = [{"__msgpack_array_chunk_a87ca2__": True} for _ in range(num_shards)]
    flat = {tuple(path.split("/")): array for path, array in tree.items()}
    for number, path in enumerate(sorted(flat)):
        array = flat[path]
        half = array.shape[0] // num_shards if array.ndim and array.shape[0] % num_shards == 0 else None
        parts = [(0, array)] if half is None else [(i, array[i * half : (i + 1) * half]) for i in range(num_shards)]
        places = []
        for shard, part in parts:
            starts = [shard * (half or 0), *[0] * part.ndim]
            place = [(start, start + length) for start, length in zip(starts, part.shape, strict=False)]
            places.append(slices(place))
            runs = np.array_split(part.reshape(-1), 2) if part.size > 1 else [part.reshape(-1)]
            entry = [
                [msgpack.ExtType(1, packed((run.shape, run.dtype.name, run.tobytes()))) for run in runs],
                msgpack.ExtType(6, places[-1]),
            ]
            shards[shard].setdefault(str(number), []).append(entry)
        info = packed(
            (packed((array.shape, array.dtype.name, False, {})), tuple(places), [shard for shard, _ in parts])
        )
        node = index
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = msgpack.ExtType(8, info)
    whole = {"version": "20220622", "shard_count": num_shards, "index": index}
    Path(f"{prefix}.index").write_bytes(packed(whole))
    for number, shard in enumerate(shards):
        Path(f"{prefix}.data-{number:05d}-of-{num_shards:05d}").write_bytes(packed(shard))


@pytest.fixture
def checkpoint(tmp_path):
    golden, _ = recorded("last2_K1_eval")
    tree = {name: array for name, array in golden.items() if name.startswith("params/")}
    write_checkpoint(tmp_path / "vmoe_1", {**tree, "opt_state/count": np.zeros((1,), np.int32)})
    return tmp_path / "vmoe_1", tree


def test_a_sharded_checkpoint_is_read_completely(checkpoint):
    prefix, tree = checkpoint
    found = read_vmoe(prefix)
    tower = found.image_tower
    assert tower is not None
    assert tower.encoder.experts is not None
    assert (tower.encoder.experts.num_experts, tower.encoder.experts.num_blocks) == (4, 2)
    assert found.num_classes == 7
    assert {f"params/{name}" for name in found.arrays} == set(tree)
    for name, array in found.arrays.items():
        np.testing.assert_array_equal(array.read(), tree[f"params/{name}"])


def test_positions_are_resampled_for_another_image_size(checkpoint):
    found = read_vmoe(checkpoint[0], image_size=24)
    (positions,) = (one for one in found.parameter_sources if one.target == "image_tower/positions")
    assert positions.combine(found.arrays[positions.array_names[0]].read()).shape == (36, 16)


def test_missing_and_truncated_shards_are_named(checkpoint):
    prefix, _ = checkpoint
    second = Path(f"{prefix}.data-00001-of-00002")
    second.write_bytes(second.read_bytes()[:-100])
    found = read_vmoe(prefix)
    with pytest.raises(UserError, match=r"00001-of-00002 is truncated"):
        [array.read() for array in found.arrays.values()]
    second.unlink()
    with pytest.raises(UserError, match=r"1 of 2 files are missing, the first is .*data-00001-of-00002"):
        read_vmoe(prefix)
    with pytest.raises(UserError, match=r"nothing\.index is missing; give the path of a V-MoE checkpoint"):
        read_vmoe(prefix.with_name("nothing"))


def test_unknown_arrays_are_refused():
    golden, _ = recorded("last2_K1_eval")
    extra = {**golden, "params/Encoder/encoderblock_0/Surprise/kernel": np.zeros(3)}
    with pytest.raises(UserError, match="Encoder/encoderblock_0/Surprise/kernel"):
        describe_vmoe(stored(extra))


# ---- other forms: attention pooling, sine-cosine positions, pooling of the first token, experts in any block ----

IMAGES = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3)).astype(np.float32)
# V-MoE's names of what big_vision has too.
NAMES = {
    "Transformer/": "Encoder/",
    "LayerNorm_0/": "LayerNorm_0/",
    "MAPHead_0/MultiHeadDotProductAttention_0/": "MapHead/MultiHeadDotProductAttention/",
    "MAPHead_0/MlpBlock_0/": "MapHead/Mlp/",
    "MAPHead_0/LayerNorm_0/": "MapHead/LayerNorm/",
    "MAPHead_0/": "MapHead/",
    "MultiHeadDotProductAttention_0/": "SelfAttention/",
    "MlpBlock_0/": "Mlp/",
}


def as_vmoe(arrays):
    """Returns a ViT of big_vision under V-MoE's names."""
    renamed = {}
    for name, array in arrays.items():
        theirs = functools.reduce(lambda name, pair: name.replace(*pair), NAMES.items(), name)
        renamed["Encoder/posembed_input/pos_embedding" if name == "pos_embedding" else theirs] = array
    return renamed


def tower_params(found):
    sources = [source for source in found.parameter_sources if not source.target.startswith("head/")]
    return load(found.arrays, sources, {"image_tower": shapes(image_tower(found))})["image_tower"]


def output(found, images):
    return run(image_tower(found), tower_params(found), images)


def test_attention_pooling_gives_the_embeddings_that_big_visions_has():
    recording = golden("two_towers_siglip")
    params = params_of(recording)
    image = {name.removeprefix("img/"): array for name, array in params.items() if name.startswith("img/")}
    found = describe_vmoe(stored(as_vmoe(image), ""))
    assert image_tower(found).pooling == "attention"
    assert_recorded(unit(output(found, pixels(recording["image"])).embedding), recording["zimg"])


@pytest.mark.slow
def test_positions_of_sines_and_cosines_need_an_image_size():
    tree, _ = recorded("last2_K1_eval")
    fixed = {name: array for name, array in tree.items() if "posembed_input" not in name}
    with pytest.raises(UserError, match=r"no positions .* set --image-size"):
        describe_vmoe(stored(fixed))
    found = describe_vmoe(stored(fixed), image_size=16)
    assert image_tower(found).positions == "sine_cosine"
    # As learned positions of the same values, where the class token has none.
    width, side = image_tower(found).encoder.width, image_tower(found).side
    same = np.concatenate([np.zeros((1, width)), sine_cosine_positions(side, side, width)]).astype(np.float32)
    learned = describe_vmoe(stored({**tree, "params/Encoder/posembed_input/pos_embedding": same[None]}))
    np.testing.assert_allclose(output(found, IMAGES).embedding, output(learned, IMAGES).embedding, atol=1e-5)


@pytest.mark.slow
def test_pooling_of_the_first_token_is_chosen_where_a_file_does_not_record_it():
    tree, _ = recorded("last2_K1_eval")
    patches_only = {name: array for name, array in tree.items() if name != "params/cls"}
    position = "params/Encoder/posembed_input/pos_embedding"
    patches_only[position] = patches_only[position][:, 1:]
    mean = output(describe_vmoe(stored(patches_only)), IMAGES)
    first = output(describe_vmoe(stored(patches_only), image_pooling="first"), IMAGES)
    np.testing.assert_allclose(mean.embedding, mean.tokens.mean(axis=1), atol=1e-6)
    np.testing.assert_allclose(first.embedding, mean.tokens[:, 0], atol=1e-6)


def test_experts_may_be_in_any_blocks():
    tree, _ = recorded("last2_K1_eval")
    swapped = {"2": "3", "3": "2"}
    moved = {re.sub("block_([23])/", lambda n: f"block_{swapped[n[1]]}/", name): array for name, array in tree.items()}
    found = describe_vmoe(stored(moved))
    experts = image_tower(found).encoder.experts
    assert experts is not None
    assert (experts.blocks, experts.block_numbers(4)) == ((1, 2), (1, 2))
    blocks = tower_params(found)["encoder"]
    router = jax.tree.leaves(blocks["expert_blocks"]["mixture"]["router"])[0]
    for index, number in enumerate((1, 3)):
        theirs = tree[f"params/Encoder/encoderblock_{number}/Moe/Router/dense/kernel"]
        np.testing.assert_array_equal(router[index], theirs)
    assert "blocks" in blocks


def test_two_towers_with_experts_in_the_text_tower_give_the_recorded_logits():
    recording = golden("vmoe_two_towers")
    experts = {"num_selected": 1, "eval_capacity_factor": 4.0, "tokens_per_group": 24}
    found = describe_two_towers(stored(recording), experts=experts)
    params, head = loaded(found), loaded(found)["head"]
    image = unit(run(image_tower(found), params["image_tower"], recording["in/image"]).embedding)
    text = unit(run(text_tower(found), params["text_tower"], recording["in/text"]).embedding)
    assert_recorded(image, recording["out/image"])
    assert_recorded(text, recording["out/text"])
    scores = image @ text.T / np.exp(head["temperature"]["log_temperature"]) + head["bias"]
    assert_recorded(scores, recording["out/logits"])
    experts_of_texts = text_tower(found).experts
    assert image_tower(found).experts is None
    assert experts_of_texts is not None
    assert experts_of_texts.num_experts == 4


def test_longer_texts_of_two_towers_interpolate_positions_and_shorter_ones_are_refused(tmp_path):
    tree = {name: array for name, array in golden("vmoe_two_towers").items() if name.startswith("params/")}
    write_checkpoint(tmp_path / "two_1", tree)
    found = formats.open_weights(str(tmp_path / "two_1"), text_length=14)
    assert text_tower(found).length == 14
    (positions,) = (one for one in found.parameter_sources if one.target == "text_tower/positions")
    (own,) = tree[f"params/{positions.array_names[0]}"]
    resized = jax.image.resize(own, (14, own.shape[1]), "linear")
    np.testing.assert_allclose(positions.combine(own[None]), resized, atol=1e-6)
    with pytest.raises(UserError, match=f"{len(own)} positions; it cannot be read with fewer: text_length = 2"):
        formats.open_weights(str(tmp_path / "two_1"), text_length=2)


def test_two_towers_need_both_of_them():
    recording = stored(golden("vmoe_two_towers"))
    with pytest.raises(UserError, match="lacks Embed_0/embedding with 2 axes"):
        describe_two_towers({name: array for name, array in recording.items() if not name.startswith("txt/")})
    with pytest.raises(UserError, match="unknown arrays: scale"):
        describe_two_towers(recording | {"scale": recording["s"]})
