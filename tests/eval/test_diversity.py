import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from scipy import stats

from lit_het.eval.metrics.diversity import Members, information_of_members
from lit_het.eval.metrics.ensembles import FEW, groups, score_ensemble
from lit_het.eval.selection import bald, entropy
from tests.eval.test_ensembles import members_of, seeds, sizes

MEASURES = ("kl", "disagreement", "cosine_similarity", "mean_entropy", "mutual_information", "total_entropy")


def measures(probabilities) -> dict[str, float]:
    """The means of the measures over images."""
    found = Members.of(np.log(np.asarray(probabilities, np.float64))).diversity()
    assert (*(field.name for field in dataclasses.fields(found)), "total_entropy") == MEASURES
    return {name: float(getattr(found, name).mean()) for name in MEASURES}


def test_two_members_by_hand():
    """(3/4, 1/4) and (1/4, 3/4): their cosine is (3 + 3) / (9 + 1); their mean has the entropy log 2."""
    found = measures([[[0.75, 0.25], [0.25, 0.75]]])
    own = -0.75 * np.log(0.75) - 0.25 * np.log(0.25)
    assert list(found.values()) == pytest.approx([np.log(3) / 2, 1, 0.6, own, np.log(2) - own, np.log(2)])


def test_members_that_are_sure_of_other_classes_have_only_epistemic_entropy():
    with np.errstate(divide="ignore"):
        *others, mutual_information, total = measures([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]).values()
    assert others == [np.inf, 1, 0, 0]
    assert mutual_information == total == pytest.approx(np.log(2))
    # Three members of which two agree disagree in two of three pairs.
    assert measures([[[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]]])["disagreement"] == pytest.approx(2 / 3)


def test_equal_members_have_only_aleatoric_entropy():
    log_probabilities, _ = members_of(0, members=1)
    found = Members.of(np.repeat(log_probabilities.astype(np.float64), 4, axis=1)).diversity()
    for name, value in (("kl", 0), ("disagreement", 0), ("cosine_similarity", 1), ("mutual_information", 0)):
        np.testing.assert_allclose(getattr(found, name), value, atol=1e-12)
    np.testing.assert_allclose(found.total_entropy, entropy(log_probabilities), rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(seeds, sizes)
def test_measures_agree_with_a_plain_loop_over_pairs_and_both_parts_of_the_entropy_with_selection(seed, members):
    log_probabilities = members_of(seed, members)[0].astype(np.float64)
    probabilities = np.exp(log_probabilities).swapaxes(0, 1)
    found = Members.of(log_probabilities).diversity()
    pairs = list(itertools.permutations(probabilities, 2))
    expected = {
        "kl": [stats.entropy(p, q, axis=1) for p, q in pairs],
        "disagreement": [p.argmax(axis=1) != q.argmax(axis=1) for p, q in pairs],
        "cosine_similarity": [
            [p_i @ q_i / np.linalg.norm(p_i) / np.linalg.norm(q_i) for p_i, q_i in zip(p, q, strict=True)]
            for p, q in pairs
        ],
        "mean_entropy": [stats.entropy(p, axis=1) for p in probabilities],
        "mutual_information": [stats.entropy(p, probabilities.mean(axis=0), axis=1) for p in probabilities],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(found, name), np.mean(values, axis=0), rtol=1e-4, atol=1e-6, err_msg=name)
    single = log_probabilities.astype(np.float32)
    np.testing.assert_allclose(found.mutual_information, bald(single), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found.total_entropy, entropy(single), rtol=1e-5)


@pytest.mark.parametrize(("samples", "members"), [(1, 4), (5, 3), (4, 1)])
def test_the_information_of_members_is_that_of_their_means_over_samples(samples, members):
    log_probabilities = members_of(0, members=samples * members)[0]
    expected = []
    for image in log_probabilities.astype(np.float64):
        # Predictions of one sample of every member, then of the next.
        means = [np.mean([np.exp(image[s * members + m]) for s in range(samples)], axis=0) for m in range(members)]
        expected.append(np.mean([stats.entropy(mean, np.mean(means, axis=0)) for mean in means]))
    found = information_of_members(log_probabilities, members)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)
    assert (found <= bald(log_probabilities) + 1e-5).all()  # noise only adds to it
    assert found.max() > 0.01 or members == 1


def test_normalized_disagreement_is_divided_by_the_error_rate_of_the_ensemble():
    # The ensemble is right, wrong, right, wrong; two members disagree on the first and the third image.
    first = np.array([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.7, 0.3]])
    second = np.array([[0.4, 0.6], [0.7, 0.3], [0.3, 0.7], [0.9, 0.1]])
    log_probabilities, labels = np.log(np.stack([first, second], axis=1)), np.array([0, 1, 1, 1])
    figures, errors = score_ensemble(log_probabilities, labels).figures()
    assert (figures["disagreement"], figures["joint_top1"]) == (0.5, 0.5)
    assert figures["normalized_disagreement"] == 1.0
    # By the delta method, the error of mean(d - e) / 0.5, where d - e is 1, -1, 1, -1.
    assert errors["normalized_disagreement"] == pytest.approx(np.sqrt(4 / 3) / 2 / 0.5)
    right = score_ensemble(log_probabilities, np.array([0, 0, 1, 0])).figures()
    assert not [name for part in right for name in part if name == "normalized_disagreement"]


@pytest.mark.parametrize("num_members", [2, 3, 4, 7, FEW])
def test_few_members_form_groups_of_every_size_with_every_member_equally_often(num_members):
    found = groups(num_members)
    assert list(found) == list(range(1, num_members + 1))
    for size, of_size in found.items():
        assert of_size.shape[1] == size
        assert all(len(set(group)) == size for group in of_size.tolist())
        assert len(set(np.bincount(of_size.ravel(), minlength=num_members))) == 1
    assert len(found[num_members]) == 1


def test_many_members_form_groups_without_a_common_member():
    found = groups(100)
    expected = {1: 10, 2: 10, 4: 10, 8: 10, 16: 6, 32: 3, 64: 1, 100: 1}
    assert {size: len(of_size) for size, of_size in found.items()} == expected
    for of_size in found.values():
        assert len(set(of_size.ravel().tolist())) == of_size.size


def test_smaller_ensembles_have_the_figures_of_the_mean_of_their_members():
    log_probabilities, labels = members_of(6, members=3, count=40)
    found = score_ensemble(log_probabilities, labels)
    arrays = found.figures_of_smaller()
    assert arrays["size"].tolist() == [1, 2, 3]
    whole, whole_errors = found.figures()
    pairs = [score_ensemble(log_probabilities[:, list(pair)], labels) for pair in ((0, 1), (2, 0), (1, 2))]
    for name in ("nll", "top1", "ece", "brier"):
        assert arrays[f"size/{name}"][0] == pytest.approx(whole[f"individual_{name}"])
        assert arrays[f"size/{name}/error"][0] == pytest.approx(whole_errors[f"individual_{name}"])
        assert arrays[f"size/{name}"][2] == pytest.approx(whole[f"joint_{name}"])
        expected = np.mean([pair.figures()[0][f"joint_{name}"] for pair in pairs])
        assert arrays[f"size/{name}"][1] == pytest.approx(expected)
    information = arrays["size/mutual_information"]
    assert information[0] == pytest.approx(0, abs=1e-12)
    assert information[1] == pytest.approx(np.mean([pair.figures()[0]["mutual_information"] for pair in pairs]))
    assert information[2] == pytest.approx(whole["mutual_information"])
    assert arrays["size/mutual_information/error"][2] == pytest.approx(whole_errors["mutual_information"])


@settings(max_examples=10, deadline=None)
@given(seeds)
def test_more_members_never_raise_the_mean_loss(seed: int):
    arrays = score_ensemble(*members_of(seed, members=4)).figures_of_smaller()
    for name in ("nll", "brier"):
        # Any group of four is a mean of groups of two, and those of ones.
        assert np.diff(arrays[f"size/{name}"][[0, 1, 3]]).max() <= 1e-12


def test_a_label_of_which_no_member_of_a_group_is_sure_keeps_its_log_probability():
    tiny = np.array([[-900.0, 0.0], [-800.0, 0.0], [-1.0, np.log1p(-np.exp(-1.0))]])
    result = score_ensemble(tiny[None], np.array([0])).smaller[2].joint.label_log_probability
    # Groups: the first two, the third and the first, the second and the third.
    np.testing.assert_allclose(result[0], [-800 - np.log(2), -1 - np.log(2), -1 - np.log(2)])
