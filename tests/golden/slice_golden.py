"""Cuts the recorded outputs of other implementations down to what the tests read.

Usage: python tests/golden/slice_golden.py FOLDER_OF_RECORDINGS
"""

import shutil
import sys
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent
# Read whole: each is small.
COPIED = {
    "bv": """ckpt_two_towers_siglip_style ckpt_vit_old_names ckpt_vit_old_names_expected ckpt_vit_scan_layout
        contrastive_losses fewshot_lsr flexi_resample_patchemb lr_schedules posemb_sincos2d resample_posemb text_last
        vit_gap_sincos2d vit_tok_learn""",
    "het": """compute_temperature sigmoid_het_full_fixed sigmoid_hetxl_pe_tune softmax_het_full_fixed
        softmax_het_pe_tune softmax_hetxl_full_tune softmax_hetxl_pe_fixed stats_softmax_het_full_tune
        stats_softmax_hetxl_pe_tune""",
    "vmoe": """dispatch_K1_vanilla_even_cap1 dispatch_K2_bpr_tight dispatch_K2_vanilla_ties dispatch_K4_bpr_skew_cap1
        compute_capacity router_E4_K1_noisy router_E8_K2_det router_e3_M2_E8_K1_noisy""",
}
# Folders of Hugging Face models, each with what the tests read of it.
FOLDERS = {"hf/bert": (), "hf/siglip": (), "hf/siglip_vision": ("model_v4_names.safetensors",), "hf/vit": ()}
# Tiny data sets, in the formats in which they are published and in the one that clip_benchmark writes.
DATA_FILES = ("truth.json", "cifar/cifar-10-python.tar.gz", "pets/images.tar.gz", "pets/annotations.tar.gz")
DATA_FOLDER = "clip_benchmark/wds_tiny_jpg"


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o644)


def main(recordings: Path) -> None:
    for part, names in COPIED.items():
        for name in names.split():
            copy(recordings / part / f"{name}.npz", GOLDEN / f"{name}.npz")
    for name, more in FOLDERS.items():
        for file in ("config.json", "model.safetensors", "io.npz", *more):
            copy(recordings / name / file, GOLDEN / name.replace("/", "_") / file)
    for name in DATA_FILES:
        copy(recordings / "data" / name, GOLDEN / "data" / name.removeprefix("cifar/"))
    shutil.copytree(recordings / "data" / DATA_FOLDER, GOLDEN / "data" / Path(DATA_FOLDER).name, dirs_exist_ok=True)

    def slice_model(name: str, wanted: tuple[str, ...], dropped: tuple[str, ...]) -> None:
        with np.load(recordings / f"bv/{name}.npz") as arrays:
            save(name, {k: v for k, v in arrays.items() if k.startswith(wanted) and not k.startswith(dropped)})

    vit, dropped = ("image", "params/", "out/pre_logits", "out/encoded"), "out/pre_logits_2d"
    slice_model("vit_map_learn", vit, ("params/head", dropped))
    slice_model("vit_sovit_shape", (*vit, "output"), (dropped,))
    slice_model("two_towers_siglip", ("image", "text", "params/", "zimg", "ztxt", "logits"), ())

    # One parameter of each kind: factored, over two of four axes, too small to factor, a vector and a scalar.
    with np.load(recordings / "bv/adafactor_default_bf16mom.npz") as arrays:
        leaves = ("mat", "stack", "small", "vec", "scalar")
        names = [f"{kind}{step}/{leaf}" for kind in ("grad", "update") for step in range(5) for leaf in leaves]
        save("adafactor_default_bf16mom", {name: arrays[name] for name in names})

    # Without what happens inside: 800 kB less.
    for name in ("dense_token", "e3_M2_K1_eval", "every2_K1_train_grads_indices", "last2_K1_eval"):
        with np.load(recordings / f"vmoe/model_{name}.npz") as arrays:
            save(f"model_{name}", {k: v for k, v in arrays.items() if not k.startswith("intermediates")})

    # The image tower is frozen there. Of the rest every kind of parameter stays; `left_out{i}` is the norm of the
    # gradients that are cut away, without which clipping by the global norm could not be repeated.
    with np.load(recordings / "bv/optchain_lit_adafactor.npz") as arrays:
        block = "txt/Encoder_0/encoderblock_0"
        wanted = ("txt/Embed_0", "txt/head", "txt/pos_embedding", f"{block}/LayerNorm_0", f"{block}/MlpBlock_0")

        def is_kept(path: str) -> bool:
            return path in ("t", "b") or path.startswith(wanted)

        cut: dict[str, np.ndarray] = {"meta": arrays["__meta__"]}
        for step in range(4):
            left_out = 0.0
            for name, array in arrays.items():
                group, _, path = name.partition("/")
                if group == f"grad{step}" and not is_kept(path) and not path.startswith("img/"):
                    left_out += float(np.sum(array.astype(np.float64) ** 2))
            cut[f"left_out{step}"] = np.asarray(np.sqrt(left_out), np.float32)
        for name, array in arrays.items():
            group, _, path = name.partition("/")
            if is_kept(path) and (group.startswith("grad") or group in ("params_init", "params3")):
                cut[name] = array
        save("optchain_lit_adafactor", cut)


def save(name: str, arrays: dict[str, np.ndarray]) -> None:
    np.savez_compressed(GOLDEN / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
