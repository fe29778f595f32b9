import json
from pathlib import Path

from lit_het.configs.parsing import parse_config
from lit_het.paths import locate_training
from lit_het.planning import chips
from scripts.studies import plan_chips


def test_the_documents_show_the_planned_rows_in_their_order():
    rows = json.loads(plan_chips.OUTPUT.read_text())["chips"]["rows"]
    assert [(row[0], row[1]) for row in rows] == [(row.name, row.chips) for row in plan_chips.ROWS]
    assert plan_chips.markdown(rows) in Path("docs/distributed.md").read_text()


def test_each_row_is_a_shipped_configuration_whose_flags_are_its_own_on_chips_that_are_known():
    for row in plan_chips.ROWS:
        parse_config(locate_training(Path(row.config)), row.flags.split())
        assert chips.parse(row.topology, row.slices).num_chips >= 1
