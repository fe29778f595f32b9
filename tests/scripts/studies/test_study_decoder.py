"""The study of decoders: its runs read the embeddings of the study, and its tables follow from logged metrics."""

import pytest

from lit_het.configs.quickstart_evaluations import CHARACTERS, TYPEFACE
from scripts.studies import harness, study_decoder
from scripts.studies.study_decoder import CONTRASTIVE, DETERMINISTIC, NOISY


@pytest.mark.parametrize("name", [DETERMINISTIC, NOISY, CONTRASTIVE])
def test_every_run_reads_stored_embeddings(tmp_path, name):
    config = study_decoder.configuration(name, tmp_path, tmp_path / "data", 3, 10)
    stored = str(tmp_path / ("embeddings" if name == CONTRASTIVE else "tokens"))
    assert config.data.embeddings == stored
    assert {evaluation.data.embeddings for evaluation in config.evaluations} == {stored}
    assert {shards for one in (config.data, *config.data.mixture) for shards in one.shards} == {
        str(tmp_path / "data" / "train")
    }
    assert config.seed == config.data.seed == 3
    assert config.pretrained is not None
    assert config.pretrained.run == tmp_path / "upstream"


@pytest.mark.parametrize(("steps", "expected"), [(1500, (1500, 700)), (3, (3, 3))])
def test_all_runs_of_a_trial_are_short(tmp_path, steps, expected):
    configs = [study_decoder.configuration(name, tmp_path, tmp_path, 0, steps) for name in (DETERMINISTIC, CONTRASTIVE)]
    assert tuple(config.length.amount for config in configs) == expected
    warmups = [config.schedule.warmup.amount for config in configs]
    assert warmups == ([50, 30] if steps == 1500 else [1, 1])


def test_each_set_has_a_table_with_differences_from_the_decoder(tmp_path):
    captions = {f"captioning/{images}/{part}" for images in (TYPEFACE, CHARACTERS) for part in ("", "noisy/")}
    for seed in range(3):
        decoder = {f"{start}{one}": 0.5 + seed for start in captions for one in study_decoder.CAPTIONS.values()}
        decoder |= {f"{start.replace('captioning', 'question_answering')}exact_match": 0.25 for start in captions}
        noisy = {name: value + 0.1 + 0.001 * seed for name, value in decoder.items()}
        contrastive = {
            f"zero_shot/{images}/{one}": 0.75 for images in (TYPEFACE, CHARACTERS) for one in ("top1", "ece", "aurc")
        }
        for name, figures in ((DETERMINISTIC, decoder), (NOISY, noisy), (CONTRASTIVE, contrastive)):
            content = {"settings": {"steps": 1500}, "figures": figures}
            harness.write_json(tmp_path / "results" / f"{name}_seed{seed}.json", content)
    flags = ["--output", str(tmp_path), "--seeds", "0", "1", "2", "--table"]
    assert study_decoder.main(flags) == 0
    first, second = (tmp_path / "decoder.md").read_text().split("\n\n")
    assert first.startswith(f"| {TYPEFACE}, 3 seeds | exact match |")
    assert second.startswith(f"| {CHARACTERS}, 3 seeds | exact match |")
    rows = {line.split(" | ")[0]: line for line in first.splitlines()}
    assert rows["| decoder"].startswith("| decoder | 1.500 ± 0.577 |")
    assert "(0.101 ± 0.001 *)" in rows["| decoder, HET-XL, 32 samples"]
    assert rows["| contrastive, ranking all names"].count(" - |") == 4, "what it does not measure"
