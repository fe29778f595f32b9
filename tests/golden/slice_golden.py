"""Cuts the recorded outputs of other implementations down to what the tests read.

Usage: python tests/golden/slice_golden.py FOLDER_OF_RECORDINGS
"""

import shutil
import sys
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent
# Read whole: each is small.
COPIED = (
    "bv/ckpt_two_towers_siglip_style",
    "bv/ckpt_vit_old_names",
    "bv/ckpt_vit_old_names_expected",
    "bv/ckpt_vit_scan_layout",
    "bv/contrastive_losses",
    "bv/fewshot_lsr",
    "bv/flexi_resample_patchemb",
    "bv/lr_schedules",
    "bv/posemb_sincos2d",
    "bv/resample_posemb",
    "bv/text_last",
    "bv/vit_gap_sincos2d",
    "bv/vit_tok_learn",
    "het/compute_temperature",
    "het/sigmoid_het_full_fixed",
    "het/sigmoid_hetxl_pe_tune",
    "het/softmax_het_full_fixed",
    "het/softmax_het_pe_tune",
    "het/softmax_hetxl_full_tune",
    "het/softmax_hetxl_pe_fixed",
    "het/stats_softmax_het_full_tune",
    "het/stats_softmax_hetxl_pe_tune",
    "vmoe/dispatch_K1_vanilla_even_cap1",
    "vmoe/dispatch_K2_bpr_tight",
    "vmoe/dispatch_K2_vanilla_ties",
    "vmoe/dispatch_K4_bpr_skew_cap1",
    "vmoe/compute_capacity",
    "vmoe/router_E4_K1_noisy",
    "vmoe/router_E8_K2_det",
    "vmoe/router_e3_M2_E8_K1_noisy",
)

# Folders of Hugging Face models, each with what the tests read of it.
FOLDERS = {
    "hf/bert": (),
    "hf/siglip": (),
    "hf/siglip_vision": ("model_v4_names.safetensors",),
    "hf/vit": (),
}


# Tiny data sets, in the formats in which they are published and in the one that clip_benchmark writes.
DATA_FILES = ("truth.json", "cifar/cifar-10-python.tar.gz", "pets/images.tar.gz", "pets/annotations.tar.gz")
DATA_FOLDER = "clip_benchmark/wds_tiny_jpg"


def main(recordings: Path) -> None:
    for name in COPIED:
        shutil.copyfile(recordings / f"{name}.npz", GOLDEN / f"{Path(name).name}.npz")
        (GOLDEN / f"{Path(name).name}.npz").chmod(0o644)
    for name, more in FOLDERS.items():
        folder = GOLDEN / name.replace("/", "_")
        folder.mkdir(exist_ok=True)
        for file in ("config.json", "model.safetensors", "io.npz", *more):
            shutil.copyfile(recordings / name / file, folder / file)
            (folder / file).chmod(0o644)

    data = GOLDEN / "data"
    (data / "pets").mkdir(parents=True, exist_ok=True)
    for name in DATA_FILES:
        target = data / name.removeprefix("cifar/")
        shutil.copyfile(recordings / "data" / name, target)
        target.chmod(0o644)
    shutil.copytree(recordings / "data" / DATA_FOLDER, data / Path(DATA_FOLDER).name, dirs_exist_ok=True)

    def slice_model(name: str, wanted: tuple[str, ...], dropped: tuple[str, ...]) -> None:
        with np.load(recordings / f"bv/{name}.npz") as arrays:
            save(name, {k: v for k, v in arrays.items() if k.startswith(wanted) and not k.startswith(dropped)})

    slice_model(
        "vit_map_learn", ("image", "params/", "out/pre_logits", "out/encoded"), ("params/head", "out/pre_logits_2d")
    )
    slice_model(
        "vit_sovit_shape", ("image", "params/", "output", "out/pre_logits", "out/encoded"), ("out/pre_logits_2d",)
    )
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
